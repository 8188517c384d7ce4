"""What the subcommands of `dcformer-dha` do; `dcformer_commands.dha` has their arguments.

Every stage writes what it was given beside its result. A stage whose result exists already, from the same arguments,
does nothing; one that was interrupted continues when it is called again in the same way.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

import torch

from ..conversion.output import complete_folder, refuse_to_replace
from ..errors import DCFormerError, require_extra
from ..files import locked_folder, states_of, why_not_written, write_whole
from ..loading import OPERATORS
from .folding import copy_kept, expand, fold_folder, load_model, to_gqa
from .fusion import CLOSED, SMALL_LOSS, fuse, load_fused
from .plan import HeadPlan
from .reporting import report
from .search import TRAINED_SCORES, search
from .sources import HeadSource, find_family, load_config

_GIVEN = "dha.json"
_FREE = {"command", "output", "overwrite", "save_steps"}  # what does not change a result
_HELD_OUT = 64  # rows
_LENGTH = 512  # of a row in tokens, where the model takes as many
_SUMMARY = {"train", "steps", "source_loss", "soft_loss", "folded_loss"}  # of fusion, for the card
_CARD = """# {name}

Made by dcformer-dha from {source}: {keys} key heads and {values} value heads in its layers, of {n} each
({saving:.1%} of the cache saved). DHA, arXiv 2406.06567.

{how}

It loads with `import dcformer` and Transformers' Auto classes. `plan.json` has the groups of heads, `{given}` what the
commands were given.
"""


def run(options: argparse.Namespace) -> int:
    """Runs a subcommand.

    Args:
        options: its name as `command`, and its arguments.

    Returns:
        0, or 1 on an error, which is printed.
    """
    try:
        print(_COMMANDS[options.command](options))
        return 0
    except DCFormerError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; call it in the same way to continue", file=sys.stderr)
        return 130


_PATHS = ("model", "plan", "data", "eval_data")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide on a result; of small files that they name the content, of weights and data sizes and
    times."""
    given = {name: value for name, value in vars(options).items() if name not in _FREE}
    given |= {name: os.path.normpath(given[name]) for name in _PATHS if given.get(name)}
    files = [Path(options.model) / name for name in ("config.json", _GIVEN, OPERATORS)]
    for file in (*files, *([Path(options.plan)] if getattr(options, "plan", None) else [])):
        if file.is_file():
            given[f"content of {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in Path(options.model).glob(pattern)]
    named = [getattr(options, name, None) for name in ("data", "eval_data")]
    data = [Path(file) for pattern in named if pattern for file in glob(pattern, recursive=True)]
    return given | {"files of weights": states_of(weights), "files of data": states_of(data)}


def _is_done(options: argparse.Namespace, record: Path, plan: Path | None = None) -> bool:
    """Whether the result exists, from the same arguments. A state that a killed call left beside it is removed then.

    Args:
        options: the command line.
        record: the file with the arguments of the result.
        plan: that result, where it lies beside its record.

    Raises:
        DCFormerError: when there is one from others, which is not to be replaced.
    """
    if not record.exists() or options.overwrite:
        return False
    saved, now = _read_given(record), _given(options)
    found = now | ({} if plan is None else _content_of(plan))
    if saved == found:
        state = _state(options)
        if _is_main() and state.is_dir():
            with suppress(OSError), locked_folder(state):
                # that of a run with other arguments stays: it is to replace this result
                if not _holds_state(state) or _read_given(state / _GIVEN) == now:
                    _remove_state(state)
        return True
    raise DCFormerError(
        f"{options.output} exists and was made with other arguments ({_differing(saved, found)}): choose "
        "another --output, or give --overwrite."
    )


def _content_of(plan: Path) -> dict[str, Any]:
    """What a record says of the plan that it is of: beside another, it tells nothing."""
    return {"content of the plan": hashlib.sha256(plan.read_bytes()).hexdigest()[:16]}


def _differing(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Names of the arguments that differ."""
    return ", ".join(sorted(name for name in {*saved, *now} if saved.get(name) != now.get(name)))


def _read_given(file: Path) -> dict[str, Any]:
    """The arguments in a record; none of one that is damaged, or another program's."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["given"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


@contextmanager
def _writing(output: str) -> Iterator[None]:
    """Around what writes a file of the output; a system's error there is the user's to correct."""
    try:
        yield
    except BlockingIOError as error:
        raise DCFormerError(
            f"{output} is being written by another process: wait until it ends, or choose another --output."
        ) from error
    except OSError as error:
        raise DCFormerError(
            f"{output} cannot be written: {why_not_written(error)}. Choose another --output."
        ) from error


def _state(options: argparse.Namespace) -> Path:
    """The folder of an unfinished stage's state, a hidden neighbor of its output."""
    output = Path(options.output)
    return output.with_name(f".{output.name}.run")


@contextmanager
def _started(options: argparse.Namespace) -> Iterator[Path]:
    """`_state`, with a record of the arguments, locked; what is inside writes the output, too, and then it is removed.
    After an error it stays if a state was saved in it.

    Raises:
        DCFormerError: when it is that of a run with others, or one that still runs, or cannot be written.
    """
    folder, now = _state(options), _given(options)
    if not _is_main():
        yield folder
        return
    with ExitStack() as stack:
        with _writing(options.output):
            stack.enter_context(locked_folder(folder))
        if _holds_state(folder) and (names := _differing(_read_given(folder / _GIVEN), now)):
            raise DCFormerError(
                f"{folder} holds an unfinished run with other arguments ({names}): give the same to continue it, or "
                "remove the folder to start anew."
            )
        with _writing(options.output):
            write_whole(folder / _GIVEN, json.dumps({"given": now}) + "\n")
        try:
            yield folder
        except BaseException:
            _remove_without_state(folder)
            raise
        _remove_state(folder)


def _holds_state(folder: Path) -> bool:
    return any(folder.glob("step-*/run.json"))


def _remove_state(folder: Path) -> None:
    """Removes the folder of a stage; killed meanwhile, it leaves none that holds a state without its record."""
    with suppress(OSError):
        for file in folder.glob("step-*/run.json"):
            file.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_without_state(folder: Path) -> None:
    if not _holds_state(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _search(options: argparse.Namespace) -> str:
    _set_default_length(options, has_rows=options.score in TRAINED_SCORES)
    output = Path(options.output)
    record = output.with_name(f".{output.name}.given")
    if output.exists() and not options.overwrite and not record.exists():
        raise DCFormerError(f"{options.output} exists: choose another --output, or give --overwrite.")
    if output.exists() and _is_done(options, record, output):
        return f"{options.output} exists already, from the same arguments"
    arguments = {
        name: getattr(options, name) for name in ("kv_ratio", "score", "allocation", "tie", "head_blocks", "seed")
    }
    model = options.model
    with ExitStack() as stack:
        if options.score in TRAINED_SCORES:
            if options.data is None:
                raise DCFormerError(f"--score {options.score} trains: give --data, or use --score weights.")
            rows, _ = _rows(options)
            model = load_model(options.model, options.dtype)
            trained = ("steps", "lr", "batch_size", "accumulation", "save_steps")
            arguments |= {name: getattr(options, name) for name in trained}
            arguments["batches"] = rows
        state = stack.enter_context(_started(options))
        if options.score in TRAINED_SCORES:
            arguments["checkpoint"] = state
        plan = search(model, **arguments)
        if _is_main():
            with _writing(options.output):
                plan.save(made := state / "plan.json")
                write_whole(given := state / "given.json", json.dumps({"given": _given(options) | _content_of(made)}))
                for file, place in ((given, record), (made, output)):  # the plan last: it is then not without a record
                    if place.exists():
                        shutil.copymode(place, file)
                    os.replace(file, place)
    counts = f"{plan.num_key_heads} key heads, {plan.num_value_heads} value heads"
    return f"{options.output}: {counts}; {plan.kv_saving:.1%} of {plan.source.total} heads saved"


def _fuse(options: argparse.Namespace) -> str:
    _set_default_length(options)
    output = Path(options.output)
    if _is_done(options, output / _GIVEN):
        return f"{output} exists already, from the same arguments"
    refuse_to_replace(options.model, output)
    plan = HeadPlan.load(options.plan)
    plan.check_source(HeadSource(options.model).sizes)
    rows, held_out = _rows(options, options.eval_data)
    model = load_model(options.model, options.dtype)
    with _started(options) as state:
        fused = fuse(
            model, plan, rows, options.steps, lr=options.lr, mixer_lr=options.mixer_lr, train=options.train,
            closing_steps=options.closing_steps, stop_at_loss=options.stop_at_loss, margin_steps=options.margin_steps,
            held_out=held_out, copy_model=False, seed=options.seed, batch_size=options.batch_size,
            accumulation=options.accumulation, checkpoint=state, save_steps=options.save_steps,
        )  # fmt: skip
        if fused.model is None or not _is_main():
            return "the main process writes"
        with complete_folder(output, sum(p.nbytes for p in fused.model.parameters()), options.overwrite) as folder:
            fused.save(folder)
            copy_kept(options.model, folder)
            (folder / _GIVEN).write_text(json.dumps({"given": _given(options)}, indent=1) + "\n", encoding="utf-8")
    losses, last = fused.summary, fused.losses[-1]
    small = "never" if losses["small_at"] is None else f"first at step {losses['small_at']}"
    return (
        f"{output}: loss on {losses['measured_on']} {losses['source_loss']:.4f} of the source, "
        f"{losses['soft_loss']:.4f} before folding, {losses['folded_loss']:.4f} after; fusion loss "
        f"{last['fusion']:.2g}, of the worst part {last['worst']:.2g}, below {SMALL_LOSS:g} {small}; the operators' "
        f"gap is {losses['gap']:.2g}"
    )


def _fold(options: argparse.Namespace) -> str:
    output = Path(options.output)
    if _is_done(options, output / _GIVEN):
        return f"{output} exists already, from the same arguments"
    operators = None
    facts: dict[str, Any] = {"given": _given(options)}
    if options.plan is None:
        plan, weights, record = load_fused(options.model)
        summary = facts["fusion"] = record["summary"]
        measured_on = summary.get("measured_on", "text")  # those of earlier versions do not say
        if missing := _SUMMARY - summary.keys():
            raise DCFormerError(f"{options.model}: fusion.json lacks {', '.join(sorted(missing))}: fuse again.")
        gap = max((weight - weight.mean(1, keepdim=True)).abs().max().item() for weight in weights.values())
        if gap > CLOSED and not options.accept_gap:
            raise DCFormerError(
                f"the operators of {options.model} are not closed: mixtures in a group differ by up to {gap:.3g}, and "
                f"folding changed the loss on {measured_on} from {summary['soft_loss']:.4f} to "
                f"{summary['folded_loss']:.4f}. Fuse with --closing-steps, or give --accept-gap."
            )
        operators = {part: weight.mean(1) for part, weight in weights.items()}
        losses = [f"{summary[f'{name}_loss']:.4f} {what}" for name, what in
                  (("source", "of the source"), ("soft", "before folding"), ("folded", "after folding"))]  # fmt: skip
        trained = {"all": "all parameters", "attention": "the parameters of attention only", "none": "no parameters"}
        how = (
            f"Heads were fused in {summary['steps']} steps that trained {trained[summary['train']]} and the mixtures "
            f"of heads. Loss per token on {measured_on}: {', '.join(losses)}."
        )
    else:
        plan = HeadPlan.load(options.plan)
        how = "Heads of a group were pooled by their mean, without training: expect poor text until it is trained."

    def card(folded: Any) -> str:
        return _CARD.format(
            name=output.name, source=Path(options.model).name, keys=folded.num_key_heads, values=folded.num_value_heads,
            n=folded.num_key_value_heads, saving=folded.kv_saving, how=how, given=_GIVEN,
        )  # fmt: skip

    config = fold_folder(
        options.model, plan, output, operators=operators, facts=facts, card=card, check=operators is None,
        max_shard_size=options.max_shard_size, overwrite=options.overwrite,
    )  # fmt: skip
    return f"{output}: {config.num_key_heads} key heads, {config.num_value_heads} value heads"


def _expand(options: argparse.Namespace) -> str:
    output = Path(options.output)
    if _is_done(options, output / _GIVEN):
        return f"{output} exists already, from the same arguments"
    refuse_to_replace(options.model, output)
    model = load_model(options.model)
    plain = expand(model) if options.to == "mha" else to_gqa(model)
    with complete_folder(output, sum(p.nbytes for p in plain.parameters()), options.overwrite) as folder:
        plain.save_pretrained(folder)
        copy_kept(options.model, folder)
        (folder / _GIVEN).write_text(json.dumps({"given": _given(options)}, indent=1) + "\n", encoding="utf-8")
    heads = getattr(plain.config, "num_key_value_heads", plain.config.num_attention_heads)  # GPT-NeoX has no such field
    return f"{output}: {type(plain).__name__} with {heads} key and value heads in each layer"


def _report(options: argparse.Namespace) -> str:
    return str(report(options.model, options.context, getattr(torch, options.dtype)))


_COMMANDS = {"search": _search, "fuse": _fuse, "fold": _fold, "expand": _expand, "report": _report}


def _is_main() -> bool:
    """Whether this process writes: the first, where `accelerate launch` started several."""
    return int(os.environ.get("RANK", 0)) == 0


def _set_default_length(options: argparse.Namespace, has_rows: bool = True) -> None:
    """Sets `--length` where it is not given, before it is compared with that of an earlier call; checked with rows.

    Raises:
        DCFormerError: when the model does not take rows of as many tokens, or cannot be a source.
    """
    config = load_config(options.model)
    find_family(config)
    context = config.max_position_embeddings
    if options.length is None:
        options.length = min(_LENGTH, context)
    if has_rows and not 2 <= options.length <= context:
        raise DCFormerError(
            f"--length {options.length}: expected 2 tokens, of which one is predicted, to {context}, the model's "
            "max_position_embeddings."
        )


def _rows(options: argparse.Namespace, held_out: str | None = None) -> tuple[Any, list[torch.Tensor]]:
    """Rows of `--length` tokens of the texts in `--data`, and held-out batches; none of fewer than 20 rows.

    Raises:
        DCFormerError: when there is not enough text, or it cannot be read.
    """
    require_extra("train", "reading --data", "datasets", "trl")
    if options.batch_size < 1:
        raise DCFormerError(f"--batch-size {options.batch_size}: expected at least 1 row.")
    rows = _tokenized(options, options.data, "--data")
    if held_out is not None:
        held = _tokenized(options, held_out, "--eval-data")[:_HELD_OUT]
    else:
        count = min(_HELD_OUT, len(rows) // 20)
        rows, held = rows[: len(rows) - count], rows[len(rows) - count :]
    return [{"input_ids": row} for row in rows], [*torch.stack(held).split(options.batch_size)] if held else []


def _tokenized(options: argparse.Namespace, source: str, argument: str) -> list[torch.Tensor]:
    """All texts, an end of text between them, cut into rows; at least one."""
    from transformers import AutoTokenizer

    from ..training.data import read_rows

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        texts = read_rows(source, "train", options.column)
    except (OSError, ValueError) as error:
        raise DCFormerError(f"{error}") from error
    if "messages" in texts.column_names:
        raise DCFormerError(
            f"{source} has conversations, in column {options.column or 'messages'!r}: expected texts; make a file "
            "with a column 'text' of them."
        )
    if "text" not in texts.column_names:
        raise DCFormerError(
            f"{source} has columns {' and '.join(map(repr, texts.column_names))}: expected texts in one column; name "
            "it with --column."
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [token for row in texts for token in (*tokenizer(row["text"])["input_ids"], *end)]
    if len(ids) < options.length:
        raise DCFormerError(f"{argument} {source} has less than one row of {options.length} tokens: give more text.")
    return [*torch.tensor(ids).unfold(0, options.length, options.length)]


__all__ = ["run"]
