"""A DCFormer answers few-shot questions it has not seen, through Transformers' text-generation pipeline.

    python examples/demo.py                  # 296 held-out questions, a few of them shown
    python examples/demo.py --show 20 --questions-per-task 1

The checkpoint is bundled (checkpoints/dcformer-synthetic); examples/train_synthetic.py made it.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import dcformer  # registers the model type with the Auto classes
from dcformer.errors import DCFormerError, MissingExtraError, refused
from dcformer.loading import check_parameters
from dcformer.synthetic import generate_dataset, get_task, questions

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "dcformer-synthetic"


def held_out_questions(questions_per_task: int, seed: int, num_examples: int = 3) -> list[dict]:
    """The last question of fresh contexts of the test split: no question line of it occurs in training."""
    contexts = generate_dataset("test", contexts_per_task=questions_per_task, num_examples=num_examples, seed=seed)
    return [questions(record)[-1] for record in contexts]


def answer(generator, prompts: list[str], batch_size: int) -> list[str]:
    """One word for each prompt, greedily, in left-padded batches."""
    options = {"max_new_tokens": 1, "do_sample": False, "return_full_text": False}
    answers = []
    for start in tqdm(range(0, len(prompts), batch_size), desc="answering", unit="batch"):
        outputs = generator(prompts[start : start + batch_size], batch_size=batch_size, **options)
        answers += [output[0]["generated_text"].strip() for output in outputs]
    return answers


def main(arguments: list[str] | None = None) -> float:
    """Prints questions, answers and accuracies; returns the accuracy over all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(CHECKPOINT))
    parser.add_argument("--questions-per-task", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=37)
    parser.add_argument("--show", type=int, default=6, help="questions to print in full")
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args(arguments)

    for name, least in (("questions_per_task", 1), ("batch_size", 1), ("show", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least {least}")
    try:
        asked = held_out_questions(options.questions_per_task, options.seed)
    except MissingExtraError as error:
        parser.error(str(error))
    try:
        with refused(OSError, KeyError, RuntimeError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
            check_parameters(options.checkpoint, AutoConfig.from_pretrained(options.checkpoint))
            model = AutoModelForCausalLM.from_pretrained(options.checkpoint)
    except DCFormerError as error:
        parser.error(f"--checkpoint {options.checkpoint}: no model that can be loaded, with its tokenizer ({error})")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    print(
        f"dcformer {dcformer.__version__}: {type(model).__name__} with {model.num_parameters():,} parameters, "
        f"attention {model.config._attn_implementation!r}, layers {model.config.layer_types}"
    )

    answers = answer(generator, [question["prompt"] for question in asked], options.batch_size)
    shown = {i * len(asked) // options.show for i in range(options.show)}
    by_task = defaultdict(list)
    for number, (question, given) in enumerate(zip(asked, answers, strict=True)):
        by_task[question["task_id"]].append(given == question["answer"])
        if number in shown:
            print(f"\n[{question['task_id']}]{question['prompt']} ...")
            print(f"  answer: {given}    expected: {question['answer']}")
    for name, wanted in (("a right answer", True), ("a wrong answer", False)):
        for question, given in zip(asked, answers, strict=True):
            if (given == question["answer"]) == wanted:
                expected = "" if wanted else f", expected {question['answer']!r},"
                asked_last = question["prompt"].strip().splitlines()[-1]
                print(f"\n{name}, {given!r}{expected} and where its heads look, in {asked_last}")
                print(_composed_heads(model, tokenizer, question["prompt"]))
                break
    right = sum(sum(marks) for marks in by_task.values())
    print(f"\nworst tasks: {_worst(by_task)}")
    by_pattern = defaultdict(list)
    for task, marks in by_task.items():
        by_pattern[task.partition(".")[0]] += marks
    for pattern, marks in by_pattern.items():
        print(f"{pattern:18}{sum(marks):4} of {len(marks)}")
    if told := _twins(Path(options.checkpoint)):
        print(told)
    choices = [get_task(question["task_id"]).choices for question in asked]
    print(
        f"a random fact of the question would be right in {sum(1 / n for n in choices) / len(choices):.1%}: "
        + ", ".join(f"{choices.count(n)} lead to {n} answers" for n in sorted(set(choices), reverse=True))
    )
    print(f"accuracy: {right} of {len(asked)} held-out questions = {right / len(asked):.1%}")
    return right / len(asked)


def _composed_heads(model, tokenizer, prompt: str, count: int = 4) -> str:
    """The heads whose weights composition changes most when the answer is chosen: the key each looks at, and at which
    it looks then. Composed weights need not add up to 1."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    trace, implementation = dcformer.ComposeTrace(), model.config._attn_implementation
    model.set_attn_implementation("eager")  # which has all maps
    with torch.no_grad():
        model(**inputs, compose_trace=trace)
    model.set_attn_implementation(implementation)
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    lines = []
    for index, layer in enumerate(trace.layers):
        before, after = layer.weights[0, :, -1], layer.composed_weights[0, :, -1]  # [H, S]
        for head, change in enumerate((after - before).abs().sum(-1).tolist()):
            looks = [f"{words[row[head].argmax()]!r} {row[head].max():.2f}" for row in (before, after)]
            lines.append((change, f"  layer {index}, head {head}: {looks[0]}, composed {looks[1]}"))
    return "\n".join(line for _, line in sorted(lines, reverse=True)[:count])


def _twins(checkpoint: Path) -> str | None:
    """What `training.json` says of models trained alike without composition; None where there are none."""
    file = checkpoint / "training.json"
    reports = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if len(reports) < 2:
        return None
    told = ", ".join(f"{name} {report['test_accuracy']:.1%}" for name, report in reports.items())
    return f"after training, on {next(iter(reports.values()))['test_answers']:,} other held-out questions: {told}"


def _worst(by_task: dict[str, list[bool]], count: int = 4) -> str:
    ranked = sorted(by_task, key=lambda task: sum(by_task[task]) / len(by_task[task]))[:count]
    return ", ".join(f"{task} {sum(by_task[task])}/{len(by_task[task])}" for task in ranked)


if __name__ == "__main__":
    main()
