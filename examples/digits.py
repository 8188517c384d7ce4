"""Trains small vision Transformers on handwritten digits, with and without composed heads, side by side.

    python examples/digits.py                      # what is not in docs/vision/results.json yet, then table and picture
    python examples/digits.py --output runs/digits # all of it anew, in 10 minutes on one core
    python examples/digits.py --output runs/look --seeds 0 --steps 20  # a look at how it goes
    python examples/digits.py --output runs/cifar --data cifar10  # images of your own, cifar10/{train,test}/<class>/

The digits are scikit-learn's: 1,797 real images of 8x8 pixels, in its wheel (extra `vision`). Every column gets the
same images, order, seeds, steps and learning rate. A run that is done is written to `results.json` at once, and not run
again: stop and start as you like. Every run is on one core.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from study import about_runs, read_runs, spread, write_text
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
OUTPUT = REPOSITORY / "docs" / "vision"
DIGITS = "scikit-learn's digits"
TRAIN_IMAGES = 1000  # of the digits; the other 797 are the test set
IMAGE_SIZE = 32  # of other data
BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 64, 2e-3, 0.1
STEPS, SEEDS = 400, (0, 1, 2, 3, 4)
T_QUANTILE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # of Student's distribution: 97.5 %, by degrees of freedom


@dataclass(frozen=True)
class Column:
    """A model: fields of `DCViTConfig` beside those of `SMALL`."""

    label: str
    fields: dict = field(default_factory=dict)


SMALL = {
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "representation_size": None,
    "compose_gate_init": 0.005,  # as in the presets
}
# In a grid of 4x4 patches few channels of the sine and cosine positions differ, so patches must not drown them. Chosen
# with the plain ViT, on a seed that is not in the results: values to 0.5, no representation layer.
LARGEST_PIXEL = 0.5
PLAIN = {f"compose_{name}": False for name in ("pre", "post", "query", "key", "static")} | {"qk_norm": None}
COLUMNS = {
    "vit": Column("ViT", PLAIN),
    "qk_norm": Column("ViT + QK-norm", PLAIN | {"qk_norm": "layernorm"}),
    "talking": Column("talking heads", {"compose_query": False, "compose_key": False, "qk_norm": None}),
    "dcvit": Column("DCViT"),
    "no_qk_norm": Column("DCViT without QK-norm", {"qk_norm": None}),
    # 1 + tanh(u) = 2·sigmoid(2u): a query-wise gate after the softmax is the headwise gate of Gated Attention.
    "gated": Column(
        "gated heads",
        {"compose_pre": False, "compose_key": False, "compose_projection": False, "compose_static": False}
        | {"qk_norm": None},
    ),
    "larger": Column("ViT, one size up", PLAIN | {"hidden_size": 64, "intermediate_size": 256}),
}
BASELINES = ("vit", "qk_norm")  # what the others are compared with


@cache
def load_digits():
    """The digits as `pixel_values` [N, 1, 8, 8] in [0, 0.5] and `labels` [N]: those to train on, those to test with.

    Which are which is the same for all seeds.
    """
    import torch

    from dcformer.errors import require_extra

    require_extra("vision", "examples/digits.py", "sklearn")
    from sklearn import datasets

    digits = datasets.load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] * (LARGEST_PIXEL / 16)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    return (pixels[train], labels[train]), (pixels[test], labels[test])


@cache
def load_folder(folder: str, unreadable: str):
    """The images of `folder/train` and `folder/test` as `load_digits` gives them: [N, 3, 32, 32].

    Raises:
        DCFormerError: on images that cannot be read, unless they are to be skipped; on classes that differ.
    """
    import torch
    from PIL import Image

    from dcformer.errors import DCFormerError
    from dcformer.vision import DCViTImageProcessorPil, read_image_folder

    processor = DCViTImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, do_center_crop=False)
    splits, classes = [], []
    for split in ("train", "test"):
        found = read_image_folder(Path(folder) / split, unreadable)
        if found.unreadable:
            print(f"left out {len(found.unreadable)} files that cannot be read, {found.unreadable[0]} first")
        pixels = []
        for path in tqdm(found.files, desc=f"preparing {split}", unit=" images"):
            with Image.open(path) as image:
                pixels.append(processor(image, return_tensors="pt").pixel_values[0])
        splits.append((torch.stack(pixels), torch.tensor(found.labels)))
        classes.append(found.classes)
    if classes[0] != classes[1]:
        raise DCFormerError(f"{folder}: train has the classes {classes[0]}, test has {classes[1]}; expected the same.")
    return tuple(splits)


def settings_of(column: str, seed: int, steps: int = STEPS, data: str = DIGITS) -> dict:
    """The settings of a run; a stored result is reused only if all of them are equal."""
    return {
        "column": column,
        "seed": seed,
        "data": data,
        "steps": steps,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
    }


def make_model(column: str, images, labels):
    """A new model of a column for images [N, channels, size, size]; 16 patches of a digit, 64 of another image."""
    from dcformer.vision import DCViTConfig, DCViTForImageClassification

    size = images.shape[-1]
    return DCViTForImageClassification(
        DCViTConfig(
            **SMALL | COLUMNS[column].fields,
            image_size=size,
            patch_size=2 if size == 8 else size // 8,
            num_channels=images.shape[1],
            num_labels=int(labels.max()) + 1,
        )
    )


def optimizer_of(model, lr: float):
    """AdamW with the fork's decay: of kernels only, composition's first layers and gates among them."""
    import torch

    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[name.endswith("weight") and parameter.ndim > 1].append(parameter)
    decays = [{"params": groups[True], "weight_decay": WEIGHT_DECAY}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(decays, lr=lr)


def train(settings: dict, data) -> dict:
    """One run: from nothing to its scores on the test set."""
    import torch
    from transformers import set_seed

    torch.set_num_threads(1)
    (images, labels), (test_images, test_labels) = data
    set_seed(settings["seed"])
    model = make_model(settings["column"], images, labels)
    loss, seconds = fit(model, settings, images, labels)
    with torch.no_grad():
        logits = torch.cat([model(pixel_values=part).logits for part in test_images.split(256)])
    return settings | {
        "parameters": model.num_parameters(),
        "train_loss": loss,
        "loss": torch.nn.functional.cross_entropy(logits, test_labels).item(),
        "right": int((logits.argmax(-1) == test_labels).sum()),
        "images": len(test_labels),
        "seconds": round(seconds, 1),
    }


def fit(model, settings: dict, images, labels) -> tuple[float, float]:
    """Trains a model and leaves it in evaluation: the last loss, and the seconds of the processor it took."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    steps = settings["steps"]
    optimizer = optimizer_of(model, settings["learning_rate"])
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    shuffled = torch.Generator().manual_seed(settings["seed"])  # the same order for every column
    batches: list = []
    start = time.process_time()
    model.train()
    for _ in range(steps):
        if not batches:
            order = torch.randperm(len(labels), generator=shuffled)
            batches = list(order.split(settings["batch_size"]))
            if len(batches) > 1 and len(batches[-1]) < settings["batch_size"]:
                batches.pop()
        batch = batches.pop(0)
        loss = model(pixel_values=images[batch], labels=labels[batch]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = time.process_time() - start
    model.eval()
    return loss.item(), seconds


def write_runs(path: Path, runs: list[dict]) -> None:
    runs = sorted(runs, key=lambda run: (list(COLUMNS).index(run["column"]), run["seed"]))
    write_text(path, json.dumps({"about": about_runs("scikit-learn"), "runs": runs}, indent=1) + "\n")


def train_missing(wanted: list[dict], path: Path, load) -> list[dict]:
    """Trains what is wanted and not done; returns all that is done."""
    done = read_runs(path)
    missing = [settings for settings in wanted if not any(settings.items() <= run.items() for run in done)]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
    if missing:
        data = load()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(missing, unit="run") as progress:
            for settings in progress:
                run = train(settings, data)
                same = ("column", "seed")
                done = [other for other in done if any(other[key] != run[key] for key in same)] + [run]
                write_runs(path, done)
                progress.write(
                    f"{run['column']} seed {run['seed']}: {run['right']} of {run['images']} right, loss "
                    f"{run['loss']:.4f}, {run['seconds']:.0f} s"
                )
    return done


# --- what came out ----------------------------------------------------------------------------------------------------


def by_seed(runs: list[dict], column: str, measure: str) -> dict[int, float]:
    """Seed -> the measure; "accuracy" in percent."""
    found = {}
    for run in runs:
        if run["column"] == column:
            value = 100 * run["right"] / run["images"] if measure == "accuracy" else run[measure]
            found[run["seed"]] = value
    return found


def difference(first: dict[int, float], second: dict[int, float]) -> tuple[float, float]:
    """Mean of first - second, seed by seed, and half the width of its 95 % interval (of one seed: not a number)."""
    values = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    freedom = len(values) - 1
    if freedom < 1:
        return statistics.mean(values), math.nan
    quantile = T_QUANTILE.get(freedom, 1.96 + 2.4 / freedom)  # a little wide, never narrow, beyond five seeds
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def shown(first: dict[int, float], second: dict[int, float], digits: int) -> str:
    """A difference with its interval; bold where the interval leaves 0 out."""
    mean, half = difference(first, second)
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if abs(mean) > half else text


def table(runs: list[dict]) -> str:
    """The runs in Markdown: means over seeds with standard deviations, and differences to both baselines."""
    names = [name for name in COLUMNS if by_seed(runs, name, "loss")]
    bases = [name for name in BASELINES if name in names]
    heads = [f"{what} against {COLUMNS[name].label}" for name in bases for what in ("accuracy", "loss")]
    lines = [
        "| | accuracy, % | loss | parameters | CPU seconds | " + " | ".join(heads) + " |",
        "|---|---|---|---|---|" + "---|" * len(heads),
    ]
    for name in names:
        accuracy, loss = by_seed(runs, name, "accuracy"), by_seed(runs, name, "loss")
        seconds = list(by_seed(runs, name, "seconds").values())
        cells = [
            COLUMNS[name].label,
            f"{statistics.mean(accuracy.values()):.2f} ± {spread(list(accuracy.values())):.2f}",
            f"{statistics.mean(loss.values()):.4f} ± {spread(list(loss.values())):.4f}",
            f"{next(run['parameters'] for run in runs if run['column'] == name):,}",
            f"{statistics.median(seconds):.1f}",
        ]
        for base in bases:
            if base == name:
                cells += ["", ""]
            else:
                cells.append(shown(accuracy, by_seed(runs, base, "accuracy"), 2))
                cells.append(shown(loss, by_seed(runs, base, "loss"), 4))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def picture(runs: list[dict]) -> str:
    """Every run as a dot, every mean as a line: accuracy on the left, loss on the right, in SVG."""
    names = [name for name in COLUMNS if by_seed(runs, name, "loss")]
    width, row, left = 280, 30, 190
    height = 40 + row * len(names) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + 2 * width + 40} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{left + 2 * width + 40}" height="{height}" fill="white"/>',
    ]
    for panel, (measure, title) in enumerate((("accuracy", "accuracy, %"), ("loss", "loss"))):
        values = [value for name in names for value in by_seed(runs, name, measure).values()]
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 0.01
        low, high, start = low - margin, high + margin, left + panel * (width + 20)

        def x(value, low=low, high=high, start=start):
            return start + width * (value - low) / (high - low)

        parts.append(f'<text x="{start + width / 2}" y="20" text-anchor="middle" font-weight="bold">{title}</text>')
        for i in range(4):
            tick = low + (high - low) * (i + 0.5) / 4
            label = f"{tick:.1f}" if measure == "accuracy" else f"{tick:.3f}"
            parts.append(
                f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="32" y2="{height - 34}" stroke="#ddd"/>'
                f'<text x="{x(tick):.1f}" y="{height - 16}" text-anchor="middle" fill="#555">{label}</text>'
            )
        for i, name in enumerate(names):
            y, mine = 40 + row * (i + 0.5), list(by_seed(runs, name, measure).values())
            if panel == 0:
                parts.append(f'<text x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{COLUMNS[name].label}</text>')
            color = "#c2410c" if name == "dcvit" else "#1d4ed8"
            parts += [f'<circle cx="{x(v):.1f}" cy="{y}" r="4" fill="{color}" fill-opacity="0.5"/>' for v in mine]
            mean = f"M{x(statistics.mean(mine)):.1f} {y - 10}v20"
            parts.append(f'<path d="{mean}" stroke="{color}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def report(output: Path) -> None:
    """Writes table.md and digits.svg beside results.json."""
    runs = read_runs(output / "results.json")
    if not runs:
        sys.exit(f"error: {output / 'results.json'} has no runs; train some first, without --report")
    write_text(output / "table.md", "<!-- written by examples/digits.py -->\n" + table(runs))
    write_text(output / "digits.svg", picture(runs))
    print(table(runs) + f"wrote table.md and digits.svg to {output}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results.json, table and picture")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="COLUMN",
                        help=f"models to train, of {', '.join(COLUMNS)} (default: all)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--data", type=Path, help="train on the images of this folder instead of the digits")
    parser.add_argument("--unreadable", choices=("stop", "skip"), default="stop", help="image files that are broken")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    data = DIGITS if options.data is None else str(options.data)
    path = options.output / "results.json"
    try:
        if not options.report:
            # Seed by seed, so that whatever is done compares all columns.
            wanted = [settings_of(name, s, options.steps, data) for s in options.seeds for name in options.columns]
            stored = {run["data"] for run in read_runs(path)}
            if stored - {data}:
                parser.error(f"{path} has runs on {', '.join(stored)}: choose another --output for {data}")
            load = load_digits if options.data is None else lambda: load_folder(data, options.unreadable)
            train_missing(wanted, path, load)
        report(options.output)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
