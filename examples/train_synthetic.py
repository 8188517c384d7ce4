"""Trains the checkpoint that `make demo` uses on the synthetic head-composition tasks.

    python examples/train_synthetic.py                       # from scratch, then writes checkpoints/dcformer-synthetic
    python examples/train_synthetic.py --resume              # goes on after an interruption
    python examples/train_synthetic.py --steps 5600          # in as many steps, learned or not: the bundled checkpoint
    python examples/train_synthetic.py --variants talking-heads plain-qk-norm   # its twins, for the table of the card

The twins have the same size and seed, and go through the same stages at their own pace: "plain" has all
composition off and no norms of queries and keys, "plain-qk-norm" has the norms, "plain-wide" has them and an MLP that
makes it as large as DCFormer, "talking-heads" only the static projection of composition. `synthetic_twins.py` compares
them, each at its own rate. Everything runs through `transformers.Trainer`, on a CPU.
No row is ever seen twice. Rows are drawn while training (`synthetic_rows`), from the training split alone: first what
is easy, and the next thing when that is learned (`CURRICULUM`). When all of it is learned the last part begins: rows
have examples as the demonstration's have, and the learning rate falls to 0. How many steps that takes depends on the
seed; a stage that takes long goes on at lower rates (`PATIENCE`). A run with `--steps` has one rate until its last
part, which begins that many steps before their end, whatever has been learned. It can be made longer from a checkpoint
before: `--resume` with more `--steps`, or with none.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from synthetic_rows import Stage, collate, make_row
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import dcformer
from dcformer.optimization import parameter_groups
from dcformer.synthetic import TASKS, build_tokenizer, encode, iterate_contexts

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"
TWINS = REPOSITORY / "docs" / "twins" / "table.md"
PLAIN = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}
MAX_TOKENS = 512  # of a context
WINDOW = 8  # from a fact to its person, and from the end of a question to whom it names
TOKENS = 48  # of a row
CONTEXT_TOKENS = 112  # of a row with examples
_FORMS, _PEOPLE, _SETS = ("plain", "inverted"), ("same-person", "same-object"), ("other-in-set", "different-in-set")
_COPYING = ("copy-city", "copy-object", "copy-tool")
# To find the fact of a person is what takes long to learn among other things, and serves all tasks when it is: so two
# facts, few words and no "not" first. (Of two facts a negated question wants the other one: to a model that does not
# heed the "not" yet, the two teach opposite things.)
CURRICULUM = (
    Stage(2, _PEOPLE, ("plain",), ("copy-city",)),
    Stage(2, _PEOPLE, _FORMS, _COPYING),
    Stage(2, _PEOPLE, _FORMS),
    Stage(3, _PEOPLE + _SETS),
    Stage(),
)
LEARNED = 0.25  # mean loss at which the next stage begins
ALL_LEARNED = 0.2  # mean loss of the last stage at which the decay begins
LOG_STEPS = 50  # over which they are taken
AHEAD = 5  # steps from there to the next stage: rows of the first of them have been drawn already
PATIENCE = 1200  # steps of a stage, behind each of which the rate is halved until the next stage begins
EXAMPLES = 2  # in a row of the decay
DECAY_STEPS = 1000
MOST_STEPS = 24_000  # of a run that goes on until all is learned; some two and a half hours of one core
VARIANTS = {
    "dcformer": {},
    "talking-heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "plain-qk-norm": PLAIN,  # DCFormer has the norms, too
    "plain": {**PLAIN, "qk_norm": False},
    "plain-wide": {**PLAIN, "intermediate_size": 416},  # as many parameters as DCFormer
}


def make_model(tokenizer, **switches) -> dcformer.DCFormerForCausalLM:
    """The small model: 4 layers, LG, about a million parameters.

    It starts where tokens find their like and say so (after "Mimetic Initialization of Self-Attention Layers",
    arXiv 2305.09828): keys are projected as queries are, outputs by the transpose of the values' projection, and the
    output layer is half the embeddings. These start larger than other parameters: what a token is stands clear beside
    what the first layers add.
    """
    config = dcformer.DCFormerConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        sliding_window=WINDOW,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.06,  # about 1/sqrt(hidden_size): the usual 0.02 is for wide models
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{"intermediate_size": 352, **switches},
    )
    model = dcformer.DCFormerForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    with torch.no_grad():
        model.lm_head.weight.copy_(0.5 * model.model.embed_tokens.weight)
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
            layer.self_attn.o_proj.weight.copy_(layer.self_attn.v_proj.weight.T)
    return model


class Curriculum(TrainerCallback):
    """Which stage the rows of a step are of, and when the decay begins; it ends the training after it.

    All is read from the losses that `Trainer` has logged, and keeps.

    Args:
        steps: of the run; None for as many as it takes to learn all stages, at most `MOST_STEPS`, with lower rates in
            stages that take long.
        decay_steps: the last of them, with a falling rate and rows with examples.
        warmup_steps: the first of them, with a rising rate.
        stages: of the rows.
    """

    def __init__(
        self, steps: int | None, decay_steps: int, warmup_steps: int = 0, stages: Sequence[Stage] = CURRICULUM
    ) -> None:
        self.waits = steps is None
        self.most_steps = MOST_STEPS if steps is None else steps
        self.decay_steps, self.warmup_steps, self.stages = decay_steps, warmup_steps, stages
        self.read([])

    def read(self, history: list[dict]) -> None:
        """Finds out from what `Trainer` has logged where stages and the decay begin."""
        self.begins = [0]  # the first step of each stage that has been reached
        self.decay_begins = self.most_steps - self.decay_steps
        for entry in history:
            if "loss" not in entry or entry["step"] < self.begins[-1] + 2 * LOG_STEPS:
                continue
            if len(self.begins) < len(self.stages):
                if entry["loss"] < LEARNED:
                    self.begins.append(entry["step"] + AHEAD)
            elif self.waits and entry["loss"] < ALL_LEARNED:
                self.decay_begins = min(self.decay_begins, entry["step"] + AHEAD)

    def stage_of(self, step: int) -> int:
        """Index of the stage at a step, from 0."""
        return sum(first <= step for first in self.begins) - 1

    def rate(self, step: int) -> float:
        """Share of the learning rate at a step."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        left = self.decay_begins + self.decay_steps - step
        rate = max(0.0, min(1.0, left / max(1, self.decay_steps)))
        if self.waits:
            stage_began = self.begins[self.stage_of(step)]
            rate *= 0.5 ** ((min(step, self.decay_begins) - stage_began) // PATIENCE)
        return rate

    def on_train_begin(self, args, state, control, **kwargs):
        self.read(state.log_history)

    def on_log(self, args, state, control, **kwargs):
        self.read(state.log_history)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.decay_begins + self.decay_steps:
            control.should_training_stop = control.should_save = True


class Rows(torch.utils.data.Dataset):
    """Row i of a run, made when it is asked for.

    Args:
        curriculum: tells the stage of a step, and whether its rows have examples.
        batch_size: rows of a step.
        seed: of the data.
    """

    def __init__(self, curriculum: Curriculum, batch_size: int, seed: int):
        self.curriculum, self.batch_size, self.seed = curriculum, batch_size, seed

    def __len__(self) -> int:
        return self.curriculum.most_steps * self.batch_size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        step = index // self.batch_size
        stage = self.curriculum.stages[self.curriculum.stage_of(step)]
        rng = random.Random(f"{self.seed}/{index}")
        if step >= self.curriculum.decay_begins:
            return make_row(stage, EXAMPLES, CONTEXT_TOKENS, rng)
        return make_row(stage, 0, TOKENS, rng)


def make_data(split: str, contexts_per_task: int, num_examples: int, seed: int, tokenizer) -> list[dict]:
    """Tokenized contexts; all answers are labeled, that of the first example included."""
    contexts = iterate_contexts(split, contexts_per_task, num_examples, seed, first_scored=0)
    return [encode(record, tokenizer) for record in contexts]


@torch.no_grad()
def score(model, data: list[dict], batch_size: int = 74) -> dict[str, float]:
    """Mean loss and accuracy of all labeled answers."""
    losses, hits = [], []
    for start in range(0, len(data), batch_size):
        rows = data[start : start + batch_size]
        length = max(len(row["input_ids"]) for row in rows)
        padded = {
            name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows], device=model.device)
            for name, value in (("input_ids", 0), ("labels", -100))
        }
        # right padding, which no token before it sees, needs no mask
        logits = model(input_ids=padded["input_ids"], use_cache=False).logits[:, :-1].float()
        labels = padded["labels"][:, 1:]
        scored = labels != -100
        losses.append(F.cross_entropy(logits[scored], labels[scored], reduction="none"))
        hits.append((logits.argmax(-1) == labels)[scored])
    return {
        "loss": torch.cat(losses).mean().item(),
        "accuracy": torch.cat(hits).float().mean().item(),
        "answers": sum(len(part) for part in hits),
    }


class Curve(TrainerCallback):
    """Writes losses of the training rows and scores of the validation split to `curve.jsonl`, at every checkpoint.

    Args:
        folder: of the run.
        curriculum: tells the stage.
        data: name -> contexts.
    """

    def __init__(self, folder: Path, curriculum: Curriculum, data: dict[str, list[dict]]):
        self.file, self.curriculum, self.data = folder / "curve.jsonl", curriculum, data
        self.start = time.process_time()  # the process may have had other runs

    def on_train_begin(self, args, state, control, **kwargs):
        """Measures what a process that was ended just after its checkpoint has not."""
        lines = self.file.read_text().splitlines() if self.file.is_file() else []
        if state.global_step > (json.loads(lines[-1])["step"] if lines else 0):
            self.on_save(args, state, control, **kwargs)

    def on_save(self, args, state, control, model=None, **kwargs):
        was_training = model.training
        model.eval()
        scores = {}
        for name, rows in self.data.items():
            measured = score(model, rows)
            scores |= {name: round(measured["accuracy"], 4), f"{name}_loss": round(measured["loss"], 4)}
        model.train(was_training)
        loss = next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None)
        stage = self.curriculum.stage_of(state.global_step)
        line = {"step": state.global_step, "stage": stage, "loss": loss, **scores}
        line["processor_seconds"] = round(time.process_time() - self.start)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        tqdm.write(json.dumps(line))


def newest_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that is complete: `Trainer` writes its state last. None if there is none."""
    for file in sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda f: -int(f.parent.name.split("-")[1])):
        try:
            json.loads(file.read_text())
        except ValueError:
            continue  # cut short
        return str(file.parent)
    return None


def check_settings(folder: Path, settings: dict, resume: bool) -> str | None:
    """The checkpoint to go on from, or None to begin; refuses to go on with other settings.

    Raises:
        SystemExit: naming what differs, or the checkpoints that a new run would overwrite.
    """
    file, checkpoint = folder / "settings.json", newest_checkpoint(folder)
    if checkpoint is None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "curve.jsonl").unlink(missing_ok=True)
    elif not resume:
        raise SystemExit(f"error: {folder} holds {Path(checkpoint).name}: give --resume to go on, or another --output")
    else:
        saved = json.loads(file.read_text())
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        is_free = True
        for run in (saved, settings):
            curriculum = Curriculum(run["steps"], run["decay_steps"])
            curriculum.read(state["log_history"])
            is_free &= state["global_step"] <= curriculum.decay_begins
        free = {"steps", "decay_steps"} if is_free else set()
        if differing := [name for name in settings if name not in free and saved.get(name) != settings[name]]:
            told = ", ".join(f"{name} is {saved.get(name)} there and {settings[name]} now" for name in differing)
            raise SystemExit(f"error: {checkpoint} is of another run: {told}")
    file.write_text(json.dumps(settings, indent=1) + "\n")
    return checkpoint


def train(variant: str, arguments: argparse.Namespace, tokenizer) -> dict:
    """Trains and evaluates one variant; returns what the model card says of it."""
    folder = arguments.output / variant
    names = ("steps", "decay_steps", "batch_size", "learning_rate", "weight_decay", "warmup_steps", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    checkpoint = check_settings(folder, settings, arguments.resume)
    set_seed(arguments.seed)
    model = make_model(tokenizer, attn_implementation=arguments.attention, **VARIANTS[variant])
    groups = parameter_groups(model, arguments.learning_rate, arguments.weight_decay)
    validation = {
        "alone": make_data("validation", 4, 1, arguments.seed, tokenizer),
        "in_context": make_data("validation", 2, 1 + EXAMPLES, arguments.seed, tokenizer),
    }
    curriculum = Curriculum(arguments.steps, arguments.decay_steps, arguments.warmup_steps)
    optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.98))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=curriculum.most_steps,
            per_device_train_batch_size=arguments.batch_size,
            train_sampling_strategy="sequential",  # the curriculum's order
            max_grad_norm=1.0,
            logging_steps=LOG_STEPS,
            save_steps=arguments.save_steps,
            save_total_limit=2,
            report_to="none",
            seed=arguments.seed,
            use_cpu=arguments.cpu,
            disable_tqdm=arguments.quiet,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        ),
        data_collator=partial(collate, window=WINDOW),
        train_dataset=Rows(curriculum, arguments.batch_size, arguments.seed),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, curriculum.rate)),
        callbacks=[curriculum, Curve(folder, curriculum, validation)],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    model.eval()
    scores = score(model, make_data("test", arguments.test_contexts, 1 + EXAMPLES, arguments.seed, tokenizer))
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    report = {
        "variant": variant,
        "parameters": model.num_parameters(),
        **settings,
        "test_loss": round(scores["loss"], 4),
        "test_accuracy": round(scores["accuracy"], 4),
        "test_answers": scores["answers"],
        "minutes": round(_processor_seconds(curve) / 60, 1),
        "torch": torch.__version__.split("+")[0],
        "curve": curve,
    }
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "curve"}), flush=True)
    return report


def _processor_seconds(curve: list[dict]) -> float:
    """Of all parts of an interrupted run, each of which counts from 0."""
    seconds = [line["processor_seconds"] for line in curve]
    return sum(now for now, after in zip(seconds, [*seconds[1:], 0], strict=True) if after <= now)


CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# DCFormer, synthetic head-composition tasks

A DCFormer of {parameters:,} parameters (4 layers, local and global alternating, 8 heads) trained from scratch on this
package's few-shot tasks (`dcformer.synthetic`): find the right fact of a context, transform it, answer in one word. It
is there for the demonstration and the tests, and knows {words} words. Other words are spelled with
{characters} more tokens, which mean no more to it than `<unk>`: they were added after training, with its rows.
With them it has {whole:,} parameters.

```python
import dcformer  # registers the model type
from transformers import pipeline

ask = pipeline("text-generation", model="checkpoints/dcformer-synthetic")
ask("\\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of", max_new_tokens=1)
```

## As measured

`{command}`, seed {seed}; twins with
`--variants` and `--learning-rate` as in the table. Accuracy is the share of {answers} held-out answers (contexts of
three examples, no question line of which occurs in training) that are the model's first choice. Twins had the same seed
and went through the same stages, each to the next when it had learned the last, at a learning rate that suits them. It
is one run each, with the seed for which the rates were chosen; with other seeds the early stages take much longer, so
these rows do not tell which variant is better. The next table has more of each.

| | parameters | learning rate | steps | held-out accuracy | held-out loss | processor minutes |
|---|---|---|---|---|---|---|
{rows}

For comparison: looking up a random fact of the question's statement (one of three people's, one of two items of a set)
and transforming that correctly is right in {random_fact:.1%} of the cases. Every question has
one answer, so a model can be right in all. `training.json` has the curve on the validation split;
`python benchmarks/recipe_runs.py` prints it.

## Beside its twins

Composition, talking heads and plain attention on the same rows, before the learning rate falls; accuracy is that of
validation questions (`python examples/synthetic_twins.py --report`). {twins}

Runs of DCFormer end up to 65 points apart, those of plain attention with QK-norm up to 69: on these tasks it cannot be
told whether composition helps.
"""


def add_characters(model: dcformer.DCFormerForCausalLM, tokenizer) -> None:
    """Gives a model that knows words alone a row for each character that `tokenizer` spells others with.

    It was not trained on any, so they are to it what any unknown word is: their rows are those of `<unk>`.
    """
    known = model.config.vocab_size
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[known:] = layer.weight[tokenizer.unk_token_id]


def publish(runs: Path, checkpoint: Path) -> None:
    """Makes the bundled checkpoint: weight file, tokenizer, reports of it and its trained twins, and a model card.

    It can spell words that it was not trained on, as `generate(stop_strings=...)` asks of a tokenizer.

    Raises:
        FileNotFoundError: when "dcformer" has not been trained.
    """
    first = json.loads((runs / "dcformer" / "report.json").read_text())
    reports = {"dcformer": first}
    for variant in VARIANTS:
        if (file := runs / variant / "report.json").is_file():
            report = json.loads(file.read_text())
            if all(report[name] == first[name] for name in ("steps", "decay_steps", "batch_size", "seed")):
                reports[variant] = report
    model = dcformer.DCFormerForCausalLM.from_pretrained(runs / "dcformer")
    tokenizer = build_tokenizer(model_max_length=MAX_TOKENS, spell=True)
    add_characters(model, tokenizer)
    checkpoint.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / "training.json").write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    (checkpoint / "README.md").write_text(card(checkpoint), encoding="utf-8")
    print(f"wrote {checkpoint}")


def card(checkpoint: Path) -> str:
    """The model card of a checkpoint that `publish` made, by its `training.json` and the table of its twins."""
    reports = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    first = reports["dcformer"]
    words, model = len(build_tokenizer()), dcformer.DCFormerForCausalLM.from_pretrained(checkpoint)
    rows = "\n".join(
        f"| {variant} | {r['parameters']:,} | {r['learning_rate']:g} | {r['curve'][-1]['step']} | "
        f"{r['test_accuracy']:.1%} | {r['test_loss']:.3f} | {r['minutes']} |"
        for variant, r in reports.items()
    )
    length = "" if first["steps"] is None else f" --steps {first['steps']} --decay-steps {first['decay_steps']}"
    told, table, *_ = TWINS.read_text(encoding="utf-8").partition("\n")[2].split("\n\n")
    return CARD.format(
        parameters=first["parameters"],
        whole=model.num_parameters(),
        words=words,
        characters=model.config.vocab_size - words,
        seed=first["seed"],
        command="python examples/train_synthetic.py" + length,
        answers=first["test_answers"],
        rows=rows,
        random_fact=sum(1 / task.choices for task in TASKS) / len(TASKS),
        twins=f"{told}\n\n{table}",
    )


def parse_options(options: list[str] | None = None) -> argparse.Namespace:
    """The command line's options, checked; makes the folder of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["dcformer"])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "synthetic", help="folder of the runs")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="written when the first variant is trained")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--steps", type=int, help=f"when not given, until all is learned, at most {MOST_STEPS}")
    parser.add_argument(
        "--decay-steps",
        type=int,
        help=f"last steps, with a falling rate; {DECAY_STEPS} when not given, or a quarter of fewer than 4000 steps",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="rows a step, some 130 answers")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--test-contexts", type=int, default=10, help="held-out contexts a task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default="eager", help="attn_implementation; eager is fastest on texts so short")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator that is there")
    arguments = parser.parse_args(options)
    for name in ("steps", "batch_size", "learning_rate", "save_steps", "test_contexts"):
        if (value := getattr(arguments, name)) is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected more than 0")
    most_steps = MOST_STEPS if arguments.steps is None else arguments.steps
    if arguments.decay_steps is None:
        arguments.decay_steps = min(DECAY_STEPS, most_steps // 4)
    if not 0 <= arguments.decay_steps <= most_steps:
        parser.error(f"--decay-steps {arguments.decay_steps}: expected 0 to {most_steps}, the steps of the run")
    if arguments.attention not in ("eager", "dcformer_chunked", "dcformer_triton"):
        parser.error(f"--attention {arguments.attention}: expected eager, dcformer_chunked or dcformer_triton")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {arguments.output}: {error.strerror}")
    return arguments


def main(options: list[str] | None = None) -> None:
    arguments = parse_options(options)
    tokenizer = build_tokenizer(model_max_length=MAX_TOKENS)
    for variant in arguments.variants:
        train(variant, arguments, tokenizer)
    if (arguments.output / "dcformer" / "report.json").is_file():
        publish(arguments.output, arguments.checkpoint)


if __name__ == "__main__":
    main()
