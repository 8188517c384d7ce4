"""The paper's Tables 4 and 5 with the published models: one command, with network, that can be stopped at any task.

    python examples/published_checkpoints.py --memory                       # what each model takes, before anything
    python examples/published_checkpoints.py --synthetic synthetic_dataset.jsonl
    python examples/published_checkpoints.py --report                       # the tables of what has been measured

Each model is loaded once and goes through the ten tasks of Table 4 that lm-eval has, with 0 and with 5 examples, and
through the authors' synthetic set (Table 5; `data/synthetic_dataset.jsonl` of their repository). The results of a task
are a file of their own in `--output`; a task that has one is not run again. `--models` takes names on the Hub or
folders, `--limit` the first items of each task. Needs the extra `[eval]`.
"""

import argparse
import json
import sys
from pathlib import Path

from study import write_text

MODELS = (
    "Caiyun-AI/DCFormer-2.8B",
    "Caiyun-AI/DCPythia-6.9B",
    "EleutherAI/pythia-2.8b",
    "EleutherAI/pythia-6.9b",
    "EleutherAI/pythia-12b",
)
TASKS = (
    "lambada_openai", "piqa", "winogrande", "arc_easy", "arc_challenge", "sciq", "logiqa", "boolq", "hellaswag", "race",
)  # fmt: skip
SYNTHETIC = "dcformer_synthetic"
# Name of a model, in lower case -> what the paper reports (arXiv 2405.08553): the zero-shot average of its eleven
# tasks (Table 4), perplexity and accuracy of the synthetic set (Table 5), in percent where it is accuracy.
PAPER = {
    "dcformer-2.8b": {"average": 56.4},
    "dcpythia-6.9b": {"average": 56.7, "perplexity": 7.36, "accuracy": 39.0},
    "pythia-2.8b": {"average": 53.1},
    "pythia-6.9b": {"average": 55.1, "perplexity": 10.05, "accuracy": 31.9},
    "pythia-12b": {"average": 56.5},
}


def short_name(model: str) -> str:
    """The last part of a name or folder."""
    return model.rstrip("/").rpartition("/")[2]


def result_file(output: Path, model: str, task: str, shots: int) -> Path:
    """Where the results of a task are."""
    return output / short_name(model) / f"{task}_{shots}shot.json"


def pending(options: argparse.Namespace, model: str) -> list[tuple[str, int]]:
    """Tasks and shots of a model that have no results.

    Raises:
        SystemExit: when a task has results of another model, dtype or limit.
    """
    wanted = [(task, shots) for shots in options.shots for task in options.tasks]
    wanted += [(SYNTHETIC, 0)] if options.synthetic else []
    missing = []
    for task, shots in wanted:
        file = result_file(options.output, model, task, shots)
        if not file.is_file():
            missing.append((task, shots))
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        for name, value in (("model", model), ("dtype", options.dtype), ("limit", options.limit)):
            if found[name] != value:
                raise SystemExit(f"error: {file} has {name} {found[name]}, this run {value}: give another --output")
    return missing


def evaluate(options: argparse.Namespace, model: str) -> None:
    """Runs what a model lacks, and writes a file after each task."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm

    from dcformer.evaluation import TASKS_FOLDER

    todo = pending(options, model)
    if not todo:
        return
    metadata = {"dcformer_synthetic_file": str(options.synthetic)} if options.synthetic else {}
    manager = TaskManager(include_path=str(TASKS_FOLDER), metadata=metadata)
    try:
        loaded = HFLM(
            pretrained=model, dtype=options.dtype, batch_size=options.batch_size, backend="causal",
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )  # fmt: skip
    except OSError as error:
        raise unreadable(model, error) from None
    for task, shots in tqdm(todo, desc=short_name(model), unit="task"):
        found = lm_eval.simple_evaluate(
            loaded, tasks=[task], num_fewshot=None if task == SYNTHETIC else shots, task_manager=manager,
            limit=options.limit, bootstrap_iters=0, metadata=metadata,
        )  # fmt: skip
        scores = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        file = result_file(options.output, model, task, shots)
        content = {
            "model": model,
            "task": task,
            "shots": shots,
            "limit": options.limit,
            "dtype": options.dtype,
            **scores,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(content, indent=1) + "\n")


def unreadable(model: str, error: OSError) -> SystemExit:
    """What ends the command when a model is neither a folder nor to be had from the Hub."""
    reason = str(error).strip().partition("\n")[0]
    return SystemExit(f"error: {model} cannot be read ({reason}): run with network, or give folders to --models")


def memory(models: list[str], dtype: str) -> str:
    """A table of what the parameters of each model take; its configuration is all that is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import dcformer  # noqa: F401 - registers the model types

    size = getattr(torch, dtype).itemsize
    lines = [f"| model | parameters | GiB in {dtype} |", "|---|---|---|"]
    for model in models:
        try:
            config = AutoConfig.from_pretrained(model)
        except OSError as error:
            raise unreadable(model, error) from None
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(config).num_parameters()
        lines.append(f"| {short_name(model)} | {count:,} | {count * size / 2**30:.1f} |")
    return "\n".join(lines)


def report(options: argparse.Namespace) -> str:
    """Tables 4 and 5 as measured, with the paper's figures beside them; what is missing is a dash."""

    def score(model: str, task: str, shots: int, name: str) -> float | None:
        file = result_file(options.output, model, task, shots)
        return json.loads(file.read_text(encoding="utf-8")).get(f"{name},none") if file.is_file() else None

    def cell(value: float | None, form: str = "{:.1f}", factor: float = 1.0) -> str:
        return "-" if value is None else form.format(factor * value)

    tables: list[str] = []
    for shots in options.shots if options.tasks else ():
        paper = ["paper, mean of 11"] if shots == 0 else []
        head = [f"{shots}-shot", *options.tasks, f"mean of {len(options.tasks)}", *paper]
        tables += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for model in options.models:
            scores = [score(model, task, shots, "acc") for task in options.tasks]
            whole = None if None in scores else sum(scores) / len(scores)
            row = [short_name(model), *(cell(value, factor=100) for value in (*scores, whole))]
            row += [cell(PAPER.get(short_name(model).lower(), {}).get("average"))] if paper else []
            tables.append("| " + " | ".join(row) + " |")
        tables.append("")
    tables += ["| synthetic set | perplexity | paper | accuracy | paper |", "|---|---|---|---|---|"]
    for model in options.models:
        published = PAPER.get(short_name(model).lower(), {})
        row = [
            cell(score(model, SYNTHETIC, 0, "perplexity"), "{:.2f}"),
            cell(published.get("perplexity"), "{:.2f}"),
            cell(score(model, SYNTHETIC, 0, "acc"), factor=100),
            cell(published.get("accuracy")),
        ]
        tables.append(f"| {short_name(model)} | " + " | ".join(row) + " |")
    return "\n".join(tables)


def main(words: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 1 if there is nothing to run with; the reason is one line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names on the Hub, or folders")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--shots", nargs="+", type=int, choices=(0, 5), default=[0, 5])
    parser.add_argument("--synthetic", type=Path, help="the authors' synthetic_dataset.jsonl")
    parser.add_argument("--output", type=Path, default=Path("runs/published"))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float16", help="default: %(default)s"
    )
    parser.add_argument("--batch-size", default="auto", help="default: %(default)s, the largest that fits")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--limit", type=int, help="items of each task, to try it out")
    parser.add_argument("--memory", action="store_true", help="print what the models take, and stop")
    parser.add_argument("--report", action="store_true", help="print the tables of the results so far, and stop")
    options = parser.parse_args(words)
    if options.synthetic and not options.synthetic.is_file():
        parser.error(f"--synthetic {options.synthetic}: there is no such file")
    names = [short_name(model) for model in options.models]
    if len(set(names)) < len(names):
        parser.error(f"--models {' '.join(options.models)}: their last parts name the results, and must differ")
    if options.memory:
        print(memory(options.models, options.dtype))
        return 0
    if not options.report:
        try:
            import lm_eval  # noqa: F401

            import dcformer  # noqa: F401 - registers the model types
        except ImportError as error:
            print(f"error: {error}; install it with pip install 'dcformer[eval]'", file=sys.stderr)
            return 1
        for model in options.models:
            evaluate(options, model)
    print(report(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
