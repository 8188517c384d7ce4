"""What `dcformer-analyze` does: a folder with figures, a report, the head view and metrics."""

import argparse
import base64
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..compose_dcformer import ComposeFields
from ..errors import CONFIG_ERRORS, DCFormerError, refused, reports, require_extra
from ..files import strict_json, whole_folder
from ..loading import refuse_mixtures
from ..stored_dcformer import stored_tensors, weight_files
from .attribution import attribute_heads
from .circuits import single_token
from .diversity import Diversity, head_diversity
from .html import MAX_TOKENS, head_view
from .layers import chosen, layers_of
from .maps import map_diversity
from .summary import StageSummary, composition_summary
from .terms import breakdown
from .tracing import MAPS, AnalysisTrace, trace
from .weights import StoredModel

_SHARES = (0.5, 0.9, 0.99)
_JSON = ("config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")


@reports
def run(options: argparse.Namespace) -> int:
    """Analyses a model as the command line says.

    Returns:
        0, or 1 on input that cannot be analyzed; then it prints one line, the reason.
    """
    if options.diversity:
        print(diversity_report(options.model, options.compare, options.form))
    else:
        _analyze(options)
    return 0


def diversity_report(model: str, other: str | None, form: str) -> str:
    """Diversity of the heads of model folders as a table, and the mean curves as comma-separated numbers."""
    lines = [f"Captured variance of circuits, form {form!r} (lower area, higher k: more diverse heads)", ""]
    lines += ["| model | circuit | area | k50 | k90 | k99 | effective rank |", "|---|---|---|---|---|---|---|"]
    curves = ["", "Mean curves, the share that k = 1, 2, ... directions capture:"]
    for folder in [model, other] if other else [model]:
        stored = _stored(folder)
        for circuit in ("qk", "ov"):
            found = head_diversity(stored, circuit, form)
            ks = " | ".join(f"{found.least(share).double().mean():.1f}" for share in _SHARES)
            lines.append(f"| {folder} | {circuit} | {_mean(found.area)} | {ks} | {found.effective_rank.mean():.1f} |")
            curves.append(f"{folder},{circuit}," + ",".join(f"{value:.4f}" for value in found.mean.tolist()))
    return "\n".join(lines + curves)


def _mean(values: torch.Tensor) -> str:
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f} over layers)"


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears as a whole, or not at all.

    Raises:
        DCFormerError: when it is the current folder, exists already and is not empty, is being written by another
            process, or cannot be made.
    """
    if path.resolve() == Path.cwd():
        raise DCFormerError(f"--output {path} is the current folder: name a new one.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DCFormerError(f"--output {path} exists already: name a new folder.")
    with ExitStack() as stack:
        with refused(OSError, what=f"--output {path}"):
            work = stack.enter_context(whole_folder(path.resolve()))
        yield work
        if path.exists() and any(path.iterdir()):
            raise DCFormerError(f"--output {path}: the folder is not empty any more: name a new one.")
        with refused(OSError, what=f"--output {path}"):
            stack.close()


def _require_intact(folder: str, *names: str) -> None:
    """Raises an error that names the file of a folder that cannot be read: those of the libraries do not.

    Looks at its weights and, where they exist, at the JSON files of these names.
    """
    if not Path(folder).is_dir():
        return  # a name on the Hub, or nothing
    for file in (Path(folder) / name for name in names):
        with refused(OSError, ValueError, what=str(file)):
            if file.exists() and not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                raise DCFormerError(f"{file} holds no JSON object: copy or download it again.")
    with refused(OSError):
        for weights in [str(file) for file in sorted(Path(folder).glob("*.safetensors"))] or weight_files(folder, {}):
            for _ in stored_tensors(weights):
                pass


def _config_file(folder: str) -> str:
    """The file; of a name on the Hub, the name."""
    file = Path(folder) / "config.json"
    return str(file) if file.exists() else folder


def _stored(folder: str) -> StoredModel:
    _require_intact(folder, "config.json")
    try:
        stored = StoredModel(folder)
    except DCFormerError as error:
        if str(error).startswith(folder):
            raise
        raise DCFormerError(f"{_config_file(folder)}: {error}") from error
    stored.check_finite()
    return stored


def _load(folder: str, is_image: bool) -> tuple[Any, Any]:
    from transformers import (
        AutoConfig,
        AutoImageProcessor,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoTokenizer,
    )

    _require_intact(folder, *_JSON)
    with refused(OSError, *CONFIG_ERRORS, what=_config_file(folder), loads=folder):
        config = AutoConfig.from_pretrained(folder)
    refuse_mixtures(folder)
    is_own = isinstance(config, ComposeFields)
    if not is_own:  # said before the library reports what it leaves out of a converted one
        raise DCFormerError(
            f"{folder} is a model of another library ({config.model_type}): analysis is of this package's own models, "
            "DCFormer, DCPythia and DCViT, and not of those that convert_attention has converted."
        )
    if is_image != hasattr(config, "patch_size"):
        reads, wants = ("texts", "--text") if is_image else ("images", "--image")
        raise DCFormerError(f"{folder} is a model of {reads} ({config.model_type}): give {wants}.")
    model_class: Any = AutoModelForImageClassification if is_image else AutoModelForCausalLM
    reader: Any = AutoImageProcessor if is_image else AutoTokenizer
    with refused(OSError, ValueError, KeyError, RuntimeError, what=folder):
        # in float32, whatever it is stored in: integrals of bfloat16 gradients do not add up
        both = model_class.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    model, info = both
    if missing := sorted(info["missing_keys"]):
        raise DCFormerError(
            f"{folder} lacks {len(missing)} parameters, {', '.join(missing[:3])}{', ...' if missing[3:] else ''}: "
            f"expected all of a {type(model).__name__}."
        )
    with refused(OSError, ValueError, KeyError, RuntimeError, what=folder):
        return model.eval(), reader.from_pretrained(folder)


def _analyze(options: argparse.Namespace) -> None:
    require_extra("analysis", "dcformer-analyze", "matplotlib")
    output = Path(options.output)
    with _new_folder(output) as work:
        model, reader = _load(options.model, options.image is not None)
        number = chosen([options.layer], len(layers_of(model)), "--layer")[0] if options.layer is not None else None
        inputs = _read(options, reader)
        found = trace(model, inputs, tokenizer=reader if options.image is None else None)
        summary = composition_summary(found)
        metrics: dict[str, Any] = {"model": options.model, "tokens": found.tokens, "length": found.length}
        metrics |= {"composition": [_plain(one) for one in summary], "left_out": []}
        metrics["map_diversity"] = {
            f"{metric} of {which}": map_diversity(found, which, metric).tolist()
            for which in MAPS
            for metric in (("js", "cosine") if which == "weights" else ("cosine",))
        }
        scores = None
        if options.target is not None:
            target = _target(options, model, reader)
            scores, gap = attribute_heads(model, inputs, target, return_gap=True)
            metrics["attribution"] = {"target": options.target, "scores": scores.tolist(), "completeness_gap": gap}
        figures = _figures(options, model, found, summary, scores, number, metrics)
        for name, figure in tqdm(figures.items(), desc="figures", leave=False, delay=2):
            figure.savefig(work / f"{name}.png", dpi=110)
        if found.length > MAX_TOKENS:
            metrics["left_out"].append(
                f"heads.html is left out: it shows at most {MAX_TOKENS} tokens, and there are {found.length}."
            )
        else:
            (work / "heads.html").write_text(head_view(found, title=options.model), encoding="utf-8")
        (work / "metrics.json").write_text(strict_json(metrics), encoding="utf-8")
        (work / "report.html").write_text(_report(options, work, figures, summary, metrics), encoding="utf-8")
        written = sorted(file.name for file in work.iterdir())
    for line in metrics["left_out"]:
        print(line)
    print(f"wrote {', '.join(written)} to {output}")


def _read(options: argparse.Namespace, reader: Any) -> Any:
    """The model's inputs."""
    if options.image is None:
        inputs = reader(options.text.replace("\\n", "\n"), return_tensors="pt")
        if not inputs["input_ids"].numel():
            raise DCFormerError(f"--text {options.text!r} has no tokens.")
        return inputs
    require_extra("vision", "--image", "PIL")
    from PIL import Image

    with refused(OSError, what=f"--image {options.image}"):
        image = Image.open(options.image).convert("RGB")
    return reader(images=image, return_tensors="pt")


def _target(options: argparse.Namespace, model: Any, reader: Any) -> int:
    if options.image is None:
        return single_token(reader, options.target)
    labels = model.config.label2id
    if options.target not in labels:
        raise DCFormerError(
            f"--target {options.target!r} is not a label of the model: expected one of {list(labels)[:20]}."
        )
    return int(labels[options.target])


def _plain(one: StageSummary) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in vars(one).items()}


def _figures(
    options: argparse.Namespace,
    model: Any,
    found: AnalysisTrace,
    summary: list[StageSummary],
    scores: torch.Tensor | None,
    number: int | None,
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """File name -> figure. The entry shown is named in the metrics."""
    from . import plots

    if number is None:  # where heads contribute most, or composition is strongest
        strength = scores.abs().sum(1) if scores is not None else _deviations(summary)
        number = list(found.layers)[int(strength.argmax())]
    (query,) = chosen([options.query], found.length, "--query")
    before, after = found.layers[number].maps("post")
    change = (after - before)[0, :, found.row(query)].abs().sum(0)  # [S]
    visible = found.visible(number)[found.row(query)]  # [S]
    if options.key is None:
        key = int(change.masked_fill(~visible, -1).argmax())
    else:
        (key,) = chosen([options.key], found.length, "--key")
        if not visible[key]:
            raise DCFormerError(
                f"--key {options.key}: query {query} does not see it in layer {number}; expected one of "
                f"{visible.nonzero()[:, 0].tolist()}."
            )
    metrics["shown"] = {"layer": number, "stage": "post", "query": query, "key": key}
    entry = breakdown(found, number, "post", query, key)
    metrics["shown"]["terms"] = {term: part.tolist() for term, part in entry.terms.items()}

    diversities: dict[str, tuple[Diversity, Diversity]] = {}
    try:
        diversities = _diversities(options, model)
    except DCFormerError as error:  # as of heads that have no circuits of their own
        if options.compare:  # then it was asked for
            raise
        metrics["left_out"].append(f"diversity.png is left out: {error}")
    metrics["diversity"] = {
        name: {one.circuit: {"form": one.form, "area": one.area.tolist(), "k90": one.k90.tolist()} for one in pair}
        for name, pair in diversities.items()
    }
    weights = found.layers[number].post
    component = ("key", 0, "down") if weights is not None and weights.key is not None and weights.key.rank else None
    theme = options.theme
    figures = {
        "breakdown": plots.breakdown_strip(entry, found.tokens, theme=theme),
        "terms": plots.term_shares(summary, theme=theme),
        "mean_maps": plots.mean_maps(summary, theme=theme),
    }
    if diversities:
        figures["diversity"] = plots.diversity_curves(diversities, theme=theme)
    if scores is not None:
        figures = {"attribution": plots.attribution_heatmap(scores, options.target, theme=theme)} | figures
    if options.image is None:
        figures["rows"] = plots.attention_rows(found, number, "post", query, component=component, theme=theme)
    else:
        from PIL import Image

        picture = Image.open(options.image).convert("RGB")
        figures["image"] = plots.attention_over_image(found, picture, number, query, theme=theme)
    return figures


def _diversities(options: argparse.Namespace, model: Any) -> dict[str, tuple[Diversity, Diversity]]:
    """Name -> diversity of QK and of OV, of the model and the one that it is compared with."""
    models = {options.model: model} | ({options.compare: _stored(options.compare)} if options.compare else {})
    names = [Path(name).resolve().name for name in models]
    if len(set(names)) < len(names):
        names[1] += " (--compare)"
    return {
        name: (head_diversity(one, "qk", options.form), head_diversity(one, "ov", options.form))
        for name, one in zip(names, models.values(), strict=True)
    }


def _deviations(summary: list[StageSummary]) -> torch.Tensor:
    return torch.tensor([one.deviation for one in summary if one.stage == "post"])


def _cell(value: float | None) -> str:
    return "<td></td>" if value is None else f"<td>{value:.2f}</td>"


_CAPTIONS = {
    "attribution": "What each head contributed (integrated gradients of its output).",
    "breakdown": "One entry of the attention weights: before, the parts of both projections, six terms, after.",
    "rows": "The rows of this query, before and after composition, and a component of the key-wise projection.",
    "image": "Where this patch looks, before and after composition.",
    "terms": "The share of each term in what composition changes.",
    "mean_maps": "The mean map from heads to heads, identity subtracted.",
    "diversity": "Captured variance of the heads' circuits: thin lines are layers, thick ones their mean.",
}


def _report(
    options: argparse.Namespace,
    folder: Path,
    figures: Iterable[str],
    summary: list[StageSummary],
    metrics: dict[str, Any],
) -> str:
    """The report: one file, no network. Figures are in the folder, by their names."""
    parts = []
    for name in figures:
        data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        caption = escape(_CAPTIONS[name])
        # of its own size, so that its letters can be read: what is wider than the page is moved sideways
        image = f'<div tabindex="0"><img alt="{caption}" src="data:image/png;base64,{data}"></div>'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    rows = "".join(
        f"<tr><th>{one.layer} {one.stage}</th><td>{one.deviation:.2f}</td>"
        + "".join(f"<td>{share:.1%}</td>" for share in one.shares.values())
        + "".join(map(_cell, (one.row_sum, one.most_negative, one.borrowed)))
        + "</tr>"
        for one in summary
    )
    head = "".join(f"<th>{name}</th>" for name in summary[0].shares)
    subject = escape(options.text if options.image is None else options.image)
    link = 'To look around: <a href="heads.html">heads.html</a>.' if metrics["length"] <= MAX_TOKENS else ""
    left_out = " ".join(map(escape, metrics["left_out"]))
    gap = metrics.get("attribution", {}).get("completeness_gap")
    ground, ink = ("#16181d", "#f0f0f0") if options.theme == "dark" else ("#ffffff", "#1a1a1a")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(options.model)}: composed heads</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: auto; padding: 1rem; }}
html {{ background: {ground}; color: {ink}; }}
figure {{ margin: 1.5rem 0; }} td, th {{ padding: .2rem .6rem; text-align: right; }}
a {{ color: inherit; }} div {{ overflow-x: auto; }} pre {{ white-space: pre-wrap; }}
</style></head><body>
<h1>{escape(options.model)}: composed heads</h1>
<pre>{subject}</pre>
<p>{f"Completeness gap of the attribution: {gap:.2%}. " if gap is not None else ""}Composed weights are not
probabilities: rows need not add up to 1, and entries may be negative. Numbers: metrics.json. {link} {left_out}</p>
{"".join(parts)}
<div><table><caption>Per layer and stage: deviation from the identity, shares of terms; of composed weights the mean row
sum, the least entry, and the share of patterns that a head's circuit takes from others</caption>
<tr><th></th><th>deviation</th>{head}<th>row sum</th><th>least</th><th>borrowed</th></tr>{rows}</table></div>
</body></html>
"""


__all__ = ["diversity_report", "run"]
