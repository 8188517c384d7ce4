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
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from study import write_text

import dcformer  # noqa: F401 - registers the model types
from dcformer.errors import DCFormerError, first_line, raise_bug
from dcformer.evaluation.items import FILE_KEY, read_paper_file
from dcformer.loading import check_parameters, damaged_file

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
AUTHORS_FILE = "sha256:121f68cd38c447ca8cfccddd14ca11ebeb6c87fefcd7b92296caebf6fa05db29"
MODELS_ADVICE = "run with network, or give whole folders to --models"
# Name of a model, in lower case -> what the paper reports (arXiv 2405.08553): the zero-shot average of its eleven
# tasks (Table 4), perplexity and accuracy of the synthetic set (Table 5), in percent where it is accuracy. Its figures
# of single tasks, and with five examples, are not known here.
PAPER = {
    "dcformer-2.8b": {"average": 56.4},
    "dcpythia-2.8b": {"average": 54.5},
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


def read_result(file: Path) -> dict[str, Any] | None:
    """The results of a task; None where there are none.

    Raises:
        SystemExit: when the file is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"error: {file} cannot be read ({first_line(error)}): delete it to run its task again"
        ) from None
    if not isinstance(found, dict) or not {"model", "dtype", "limit", "data"} <= set(found):
        raise SystemExit(f"error: {file} holds no results of this script: delete it to run its task again")
    return found


def pending(options: argparse.Namespace, model: str) -> list[tuple[str, int]]:
    """Tasks and shots of a model that have no results.

    Raises:
        SystemExit: when a task has results of another model, dtype, limit or synthetic file.
    """
    wanted = [(task, shots) for shots in options.shots for task in options.tasks]
    wanted += [(SYNTHETIC, 0)] if options.synthetic else []
    missing = []
    for task, shots in wanted:
        file = result_file(options.output, model, task, shots)
        if (found := read_result(file)) is None:
            missing.append((task, shots))
            continue
        now = {"model": model, "dtype": options.dtype, "limit": options.limit}
        now |= {"data": digest(options.synthetic)} if task == SYNTHETIC else {}
        for name, value in now.items():
            if found[name] != value:
                raise SystemExit(f"error: {file} has {name} {found[name]}, this run {value}: give another --output")
    return missing


def digest(file: Path) -> str:
    """Tells a file's content from others."""
    return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


@contextmanager
def one_line(what: str, advice: str, model: str | None = None) -> Iterator[None]:
    """Around a call of a library with the user's input: its error ends the command with one line. Bugs are raised."""
    try:
        yield
    except Exception as error:
        raise_bug(error, (Exception,))
        reason = (model and damaged_file(model, error)) or first_line(error)
        raise SystemExit(f"error: {what} cannot be read ({reason}): {advice}") from None


def check_input(options: argparse.Namespace, todo: dict[str, list[tuple[str, int]]]) -> None:
    """What can be checked before models are loaded: their configurations and tokenizers, data, and the output.

    Raises:
        SystemExit: with one line.
    """
    from transformers import AutoConfig, AutoTokenizer

    for model in todo:
        with one_line(model, MODELS_ADVICE, model):
            config = AutoConfig.from_pretrained(model)
            check_parameters(model, config)
        with one_line(f"the tokenizer of {model}", MODELS_ADVICE, model):
            tokenizer = AutoTokenizer.from_pretrained(model)
        if tokenizer.vocab_size > config.vocab_size:
            raise SystemExit(
                f"error: {model} has a vocabulary of {config.vocab_size}, its tokenizer {tokenizer.vocab_size} tokens"
            )
    manager = task_manager(options)
    for task in dict.fromkeys(task for tasks in todo.values() for task, _ in tasks):
        with one_line(f"data of {task}", "run with network, or leave the task out of --tasks"):
            manager.load([task])
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:
        raise SystemExit(f"error: --output {options.output}: no file can be written there ({error.strerror})") from None


def task_manager(options: argparse.Namespace) -> Any:
    """Finds lm-eval's tasks and this package's."""
    from lm_eval.tasks import TaskManager

    from dcformer.evaluation import TASKS_FOLDER

    return TaskManager(include_path=str(TASKS_FOLDER), metadata=metadata(options))


def metadata(options: argparse.Namespace) -> dict[str, str]:
    """What lm-eval hands to the tasks."""
    return {FILE_KEY: str(options.synthetic)} if options.synthetic else {}


def evaluate(options: argparse.Namespace, model: str, todo: list[tuple[str, int]]) -> None:
    """Runs what a model lacks, and writes a file after each task."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm

    manager = task_manager(options)
    with one_line(model, MODELS_ADVICE, model):
        loaded = HFLM(
            pretrained=model, dtype=options.dtype, batch_size=options.batch_size, backend="causal",
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )  # fmt: skip
    for task, shots in tqdm(todo, desc=short_name(model), unit="task"):
        found = lm_eval.simple_evaluate(
            loaded, tasks=[task], num_fewshot=None if task == SYNTHETIC else shots, task_manager=manager,
            limit=options.limit, bootstrap_iters=0, metadata=metadata(options),
        )  # fmt: skip
        scores = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        config = found["configs"].get(task, {})  # a group has none
        data = [config.get(name) for name in ("dataset_path", "dataset_name")]
        file = result_file(options.output, model, task, shots)
        content = {
            "model": model,
            "task": task,
            "shots": shots,
            "limit": options.limit,
            "dtype": options.dtype,
            "data": digest(options.synthetic) if task == SYNTHETIC else " ".join(name for name in data if name),
            "lm_eval": version("lm_eval"),
            **scores,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(content, indent=1) + "\n")


def memory(models: list[str], dtype: str) -> str:
    """A table of what the parameters of each model take; its configuration is all that is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    size = getattr(torch, dtype).itemsize
    lines = [f"| model | parameters | GiB in {dtype} |", "|---|---|---|"]
    for model in models:
        with one_line(model, MODELS_ADVICE, model), torch.device("meta"):
            count = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters()
        lines.append(f"| {short_name(model)} | {count:,} | {count * size / 2**30:.1f} |")
    return "\n".join(lines)


def report(options: argparse.Namespace) -> str:
    """Tables 4 and 5 as measured, with the paper's figures beside them; what is missing is a dash.

    Scores of the first items only have a star; below the tables is what each model's results were made from.
    """

    def read(model: str, task: str, shots: int) -> dict[str, Any] | None:
        return read_result(result_file(options.output, model, task, shots))

    def cell(value: float | None, form: str = "{:.1f}", factor: float = 1.0, star: object = None) -> str:
        return "-" if value is None else form.format(factor * value) + "*" * bool(star)

    def score(found: dict[str, Any] | None, name: str, **how: Any) -> str:
        return "-" if found is None else cell(found.get(f"{name},none"), star=found["limit"], **how)

    tables: list[str] = []
    for shots in options.shots if options.tasks else ():
        paper = ["paper, mean of 11"] if shots == 0 else []
        head = [f"{shots}-shot", *options.tasks, f"mean of {len(options.tasks)}", *paper]
        tables += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for model in options.models:
            found = [read(model, task, shots) for task in options.tasks]
            scores = [one["acc,none"] for one in found if one is not None]
            whole = sum(scores) / len(scores) if len(scores) == len(found) else None
            row = [short_name(model), *(score(one, "acc", factor=100) for one in found)]
            row += [cell(whole, factor=100, star=any(one and one["limit"] for one in found))]
            row += [cell(PAPER.get(short_name(model).lower(), {}).get("average"))] if paper else []
            tables.append("| " + " | ".join(row) + " |")
        tables.append("")
    tables += ["| synthetic set | perplexity | paper | accuracy | paper |", "|---|---|---|---|---|"]
    for model in options.models:
        published, measured = PAPER.get(short_name(model).lower(), {}), read(model, SYNTHETIC, 0)
        row = [
            score(measured, "perplexity", form="{:.2f}"),
            cell(published.get("perplexity"), "{:.2f}"),
            score(measured, "acc", factor=100),
            cell(published.get("accuracy")),
        ]
        tables.append(f"| {short_name(model)} | " + " | ".join(row) + " |")
    notes = []
    for model in options.models:
        pairs = [(task, shots) for shots in options.shots for task in options.tasks] + [(SYNTHETIC, 0)]
        made = {pair: found for pair in pairs if (found := read(model, *pair)) is not None}
        limited = [f"{t} {n}-shot (--limit {one['limit']})" for (t, n), one in made.items() if one["limit"]]
        sources = sorted({f"{one['model']} in {one['dtype']}" for one in made.values()})
        notes += [f"- {short_name(model)}: {', '.join(sources)}"] if made else []
        notes += [f"  * first items only: {', '.join(limited)}"] if limited else []
        if (SYNTHETIC, 0) in made and (data := made[SYNTHETIC, 0]["data"]) != AUTHORS_FILE:
            notes += [f"  the synthetic set is not the authors' file, but {data}: the paper has no figures of it"]
    return "\n".join([*tables, "", *notes])


def batch_size(text: str) -> str:
    """A value of --batch-size."""
    if not re.fullmatch(r"[1-9]\d*|auto(:\d+(\.\d+)?)?", text):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of at least 1 nor auto")
    return text


def device(text: str) -> str:
    """A value of --device."""
    import torch

    try:
        return str(torch.device(text))
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(first_line(error)) from None


def items(text: str) -> int:
    """A value of --limit."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def main(words: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 1 if there is nothing to run with; the reason is one line.

    Raises:
        SystemExit: with one line, where what is given cannot be used. Bugs, and whatever goes wrong once items are
            evaluated, keep their traceback.
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
    parser.add_argument(
        "--batch-size", type=batch_size, default="auto", help="default: %(default)s, the largest that fits"
    )
    parser.add_argument("--device", type=device, help="default: the GPU if there is one")
    parser.add_argument("--limit", type=items, help="items of each task, to try it out")
    parser.add_argument("--memory", action="store_true", help="print what the models take, and stop")
    parser.add_argument("--report", action="store_true", help="print the tables of the results so far, and stop")
    options = parser.parse_args(words)
    options.models = [os.path.normpath(model) if os.path.isdir(model) else model for model in options.models]
    options.tasks, options.shots = list(dict.fromkeys(options.tasks)), list(dict.fromkeys(options.shots))
    names = [short_name(model) for model in options.models]
    if len(set(names)) < len(names):
        parser.error(f"--models {' '.join(options.models)}: their last parts name the results, and must differ")
    if options.memory:
        print(memory(options.models, options.dtype))
        return 0
    if not options.report:
        try:
            import lm_eval  # noqa: F401
        except ImportError as error:
            print(f"error: {error}; install it with pip install 'dcformer[eval]'", file=sys.stderr)
            return 1
        if options.synthetic:
            try:
                read_paper_file(options.synthetic)
            except DCFormerError as error:
                raise SystemExit("error: " + str(error).replace(f"--metadata {FILE_KEY}=", "--synthetic ")) from None
        todo = {model: tasks for model in options.models if (tasks := pending(options, model))}
        check_input(options, todo)
        for model, tasks in todo.items():
            evaluate(options, model, tasks)
    print(report(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
