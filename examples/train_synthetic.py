"""Trains the checkpoint that `make demo` uses, and its two twins, on the synthetic head-composition tasks.

    python examples/train_synthetic.py                       # all three, then writes checkpoints/dcformer-synthetic
    python examples/train_synthetic.py --variants plain      # one of them, into runs/synthetic/plain; the
                                                             # checkpoint is written once all three are there

The twins have the same size, seed, data and steps: "plain" has all composition off, "talking-heads" only the static
projection. Everything runs through `transformers.Trainer`, on a CPU in under an hour. A short curriculum makes that
possible: contexts of one example first, then the few-shot contexts that the model is for.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

import dcformer
from dcformer.synthetic import TASKS, build_tokenizer, encode, generate_dataset

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"
PLAIN = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}
MAX_TOKENS = 512  # of a context
# (examples a context, contexts a step, share of the steps, learning rate at the end relative to the peak)
CURRICULUM = ((1, 96, 0.8, 0.5), (3, 32, 0.2, 0.0))
VARIANTS = {
    "dcformer": {},
    "talking-heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "plain": PLAIN,
}


def make_config(tokenizer, **switches) -> dcformer.DCFormerConfig:
    """The small model: 4 layers, LG, about a million parameters."""
    return dcformer.DCFormerConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        sliding_window=32,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.06,  # about 1/sqrt(hidden_size): the usual 0.02 is for wide models
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **switches,
    )


def make_data(split: str, contexts_per_task: int, num_examples: int, seed: int, tokenizer):
    """Tokenised contexts; the loss is on the answers, that of the first example included."""
    contexts = generate_dataset(
        split, contexts_per_task=contexts_per_task, num_examples=num_examples, seed=seed, first_scored=0
    )
    return contexts.map(
        lambda record: encode(record, tokenizer),
        remove_columns=contexts.column_names,
        desc=f"tokenising {split}",
    )


def answer_accuracy(prediction) -> dict[str, float]:
    """Share of answers that are the model's first choice; predictions are token ids, already argmaxed."""
    predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    scored = labels != -100
    return {"accuracy": float((predicted == labels)[scored].mean()), "answers": int(scored.sum())}


def train(variant: str, arguments: argparse.Namespace, tokenizer, phases: list, test_data) -> dict:
    """Trains and evaluates one variant; returns what the model card says of it."""
    set_seed(arguments.seed)
    config = make_config(tokenizer, attn_implementation=arguments.attention, **VARIANTS[variant])
    model = dcformer.DCFormerForCausalLM(config)
    folder = arguments.output / variant
    seconds, history = 0.0, []
    peak = arguments.learning_rate
    for number, (data, (_, batch_size, share, end)) in enumerate(zip(phases, CURRICULUM, strict=True)):
        steps = round(arguments.steps * share)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(folder),
                max_steps=steps,
                per_device_train_batch_size=batch_size,
                per_device_eval_batch_size=74,
                learning_rate=peak,
                adam_beta2=0.98,
                weight_decay=0.1,
                max_grad_norm=1.0,
                warmup_steps=100 if number == 0 else 0,
                lr_scheduler_type="polynomial",
                lr_scheduler_kwargs={"lr_end": peak * end + 1e-9, "power": 1.0},
                logging_steps=50,
                eval_strategy="steps",
                eval_steps=max(1, steps // 4),
                save_strategy="no",
                report_to="none",
                seed=arguments.seed,
                use_cpu=arguments.cpu,
                disable_tqdm=arguments.quiet,
                dataloader_pin_memory=False,
            ),
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
            train_dataset=data,
            eval_dataset=test_data,
            compute_metrics=answer_accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: (
                logits[0] if isinstance(logits, tuple) else logits
            ).argmax(-1),
        )
        start = time.perf_counter()
        result = trainer.train()
        seconds += time.perf_counter() - start
        history += [{"phase": number} | e for e in trainer.state.log_history if "loss" in e or "eval_loss" in e]
        peak *= end
    scores = trainer.evaluate()
    report = {
        "variant": variant,
        "parameters": model.num_parameters(),
        "steps": arguments.steps,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "last_phase_train_loss": round(result.training_loss, 4),
        "test_loss": round(scores["eval_loss"], 4),
        "test_accuracy": round(scores["eval_accuracy"], 4),
        "test_answers": scores["eval_answers"],
        "minutes": round(seconds / 60, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
    }
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "history.json").write_text(json.dumps(history, indent=1) + "\n")
    print(json.dumps(report), flush=True)
    return report


CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# DCFormer, synthetic head-composition tasks

A DCFormer of {parameters:,} parameters (4 layers, local and global alternating, 4 heads) trained from scratch on this
package's few-shot tasks (`dcformer.synthetic`): find the right fact of a context, transform it, answer in one word. It
is there for the demonstration and the tests, and knows {vocabulary} words.

```python
import dcformer  # registers the model type
from transformers import pipeline

ask = pipeline("text-generation", model="checkpoints/dcformer-synthetic")
ask("\\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of", max_new_tokens=1)
```

## As measured

`python examples/train_synthetic.py`: the same data, seed ({seed}), {steps} steps and size for all three. Accuracy is
the share of {answers} held-out answers (contexts of three examples, no question line of which occurs in training) that
are the model's first choice. One run each on a CPU: differences of a few points mean nothing.

| | parameters | held-out accuracy | held-out loss | minutes ({threads} threads) |
|---|---|---|---|---|
{rows}

For comparison: looking up a random fact of the question's statement (one of three people's, one of two items of a set)
and transforming that correctly is right in {random_fact:.1%} of the cases. A model near that level knows its
vocabulary's facts and the transformations but does not yet choose the fact by the pattern that the question asks for.
"""


def publish(runs: Path, checkpoint: Path) -> None:
    """Makes the bundled checkpoint from the runs of all three variants: weights, tokenizer and a model card.

    Raises:
        FileNotFoundError: when a variant has not been trained.
    """
    reports = {variant: json.loads((runs / variant / "report.json").read_text()) for variant in VARIANTS}
    model = dcformer.DCFormerForCausalLM.from_pretrained(runs / "dcformer")
    tokenizer = AutoTokenizer.from_pretrained(runs / "dcformer")
    rows = "\n".join(
        f"| {variant} | {r['parameters']:,} | {r['test_accuracy']:.1%} | {r['test_loss']:.3f} | {r['minutes']} |"
        for variant, r in reports.items()
    )
    first = reports["dcformer"]
    card = CARD.format(
        parameters=first["parameters"],
        vocabulary=len(tokenizer),
        seed=first["seed"],
        steps=first["steps"],
        answers=first["test_answers"],
        threads=first["threads"],
        rows=rows,
        random_fact=sum(1 / 2 if task.pattern.endswith("in-set") else 1 / 3 for task in TASKS) / len(TASKS),
    )
    checkpoint.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / "README.md").write_text(card, encoding="utf-8")
    (checkpoint / "training.json").write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {checkpoint}")


def main(options: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "synthetic", help="folder of the runs")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="written when all variants are trained")
    parser.add_argument("--steps", type=int, default=1750, help="of all phases of the curriculum together")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--test-contexts", type=int, default=10, help="held-out contexts a task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default=None, help="attn_implementation; the best that runs here when not given")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator that is there")
    arguments = parser.parse_args(options)
    for name in ("steps", "learning_rate"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected more than 0")
    if arguments.attention not in (None, "eager", "dcformer_chunked", "dcformer_triton"):
        parser.error(f"--attention {arguments.attention}: expected eager, dcformer_chunked or dcformer_triton")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {arguments.output}: {error.strerror}")

    tokenizer = build_tokenizer(model_max_length=MAX_TOKENS)
    phases = []
    for num_examples, batch_size, share, _ in CURRICULUM:
        contexts_per_task = -(-round(arguments.steps * share) * batch_size // len(TASKS))
        phases.append(make_data("train", contexts_per_task, num_examples, arguments.seed, tokenizer))
    test_data = make_data("test", arguments.test_contexts, CURRICULUM[-1][0], arguments.seed, tokenizer)
    print("training contexts:", [len(data) for data in phases], "test contexts:", len(test_data), flush=True)
    for variant in arguments.variants:
        train(variant, arguments, tokenizer, phases, test_data)
    if all((arguments.output / variant / "report.json").is_file() for variant in VARIANTS):
        publish(arguments.output, arguments.checkpoint)


if __name__ == "__main__":
    main()
