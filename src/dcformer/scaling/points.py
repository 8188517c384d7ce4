"""Runs as points of compute and loss: from a table, or from the folders that trainers leave."""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..analysis import num_parameters
from ..configuration_dcformer import DCFormerConfig
from ..errors import CONFIG_ERRORS, DCFormerError, is_of_package, refused
from ..head_systems.costs import count_parameters, count_training_flops
from ..modules.saving import is_converted

COLUMNS = {  # that a measure of compute takes, by its name
    "6nd": "columns parameters and tokens",
    "6nd-nonembed": "columns parameters, embedding_parameters and tokens",
    "flops": "column flops",
}
MEASURES = tuple(COLUMNS)
_NUMBERS = ("parameters", "embedding_parameters", "tokens", "flops", "loss")
_NEEDED = ("family", "parameters", "tokens", "loss")
_LARGEST_LOSS = 20.0  # nats; ln(vocabulary) of the largest vocabularies is below 13
_UNKNOWN_SEED = -1
_SLOWEST = 0.01  # steps a second, of which rounding to thousandths takes 5 % at most


@dataclass(frozen=True)
class Point:
    """One finished run.

    Attributes:
        family: what is compared, such as "transformer++".
        parameters: all of them, N.
        tokens: that were trained on.
        loss: validation loss in nats per token.
        embedding_parameters: those of input and output embeddings; None where unknown.
        flops: counted operations of the whole training, composition included; None where unknown.
        seed: of the run; runs of a family and size that differ in it are repetitions.
        source: where the run is from, for messages.
    """

    family: str
    parameters: float
    tokens: float
    loss: float
    embedding_parameters: float | None = None
    flops: float | None = None
    seed: int = 0
    source: str = ""

    def compute(self, measure: str) -> float:
        """C of this run.

        Args:
            measure: "6nd" (6 N tokens, with all parameters), "6nd-nonembed" (without those of embeddings) or "flops"
                (counted).

        Raises:
            DCFormerError: when the run lacks the number that the measure needs.
        """
        if measure == "6nd":
            return 6 * self.parameters * self.tokens
        if measure == "6nd-nonembed":
            if self.embedding_parameters is None:
                raise DCFormerError(
                    f"{self.source}: no embedding_parameters, which --compute 6nd-nonembed needs: add the column, or "
                    "use --compute 6nd"
                )
            return 6 * (self.parameters - self.embedding_parameters) * self.tokens
        if self.flops is None:
            raise DCFormerError(
                f"{self.source}: no flops, which --compute flops needs: add the column, or use --compute 6nd"
            )
        return self.flops


def of_family(points: Sequence[Point], family: str) -> list[Point]:
    """The runs of a family.

    Raises:
        DCFormerError: when there are none; the message lists the families that were found.
    """
    found = [point for point in points if point.family == family]
    if not found:
        names = ", ".join(sorted({point.family for point in points})) or "none"
        raise DCFormerError(f"column family: no run is of family {family!r}: found {names}")
    return found


def read_points(path: str | Path, perplexity: bool = False, mixed_tokens: bool = False) -> list[Point]:
    """Runs from a file or a folder.

    Args:
        path: a CSV file with columns family, parameters, tokens, loss and perhaps embedding_parameters, flops, seed; or
            a folder `<family>/<any name>/` of trainers' outputs. Those of other architectures have no flops, nor have
            those that do not tell how long their rows were.
        perplexity: losses are perplexities; their logarithm is taken.
        mixed_tokens: runs of one size may differ in tokens; each number of tokens then counts as a size.

    Returns:
        the runs, in no particular order.

    Raises:
        DCFormerError: naming file, row and column, for what is not a run, and for a run that is there twice.
    """
    path = Path(path)
    if path.is_dir():
        states = sorted(path.rglob("trainer_state.json"))  # of runs, and not of the checkpoints below
        states = [state for state in states if not state.parent.name.startswith("checkpoint-")]
        points = _numbered([_of_trainer(path, state, perplexity) for state in states])
    else:
        points = _of_table(path, perplexity)
    if not points:
        raise DCFormerError(f"{path}: no runs: expected rows, or folders with a trainer_state.json and a config.json")
    _check_once(points)
    if not mixed_tokens:
        _check_tokens(points)
    return points


def _check_once(points: Iterable[Point]) -> None:
    first: dict[tuple[str, float, float, int], Point] = {}
    for point in points:
        other = first.setdefault((point.family, point.parameters, point.tokens, point.seed), point)
        if other is not point:
            raise DCFormerError(
                f"{point.source}: family {point.family!r}, {point.parameters:g} parameters, seed {point.seed}, as "
                f"{other.source}: remove one, or give each run its own seed"
            )


def _check_tokens(points: Iterable[Point]) -> None:
    first: dict[tuple[str, float], Point] = {}
    for point in points:
        other = first.setdefault((point.family, point.parameters), point)
        if other.tokens != point.tokens:
            raise DCFormerError(
                f"{point.source}, column tokens: {point.tokens:g}, but {other.source} of the same family and size has "
                f"{other.tokens:g}: give runs of one law, or --mixed-tokens to count each number of tokens as a size"
            )


# --- tables -----------------------------------------------------------------------------------------------------------


def _of_table(path: Path, perplexity: bool) -> list[Point]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            if twice := [name for name, count in Counter(columns).items() if count > 1]:
                raise DCFormerError(f"{path}: column {twice[0]!r} is there twice: remove one")
            if missing := [name for name in _NEEDED if name not in columns]:
                raise DCFormerError(f"{path}: no column {missing[0]!r}: expected {', '.join(_NEEDED)}; found {columns}")
            return [_of_row(f"{path}, row {reader.line_num}", row, perplexity) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DCFormerError(f"{path} cannot be read: {error}") from error


def _of_row(source: str, row: Mapping[str, Any], perplexity: bool) -> Point:
    """A line of a table; rows are counted as editors count lines, the heading is the first."""
    if not (family := (row["family"] or "").strip()):
        raise DCFormerError(f"{source}, column family: empty, expected a name")
    if extra := row.get(None):  # type: ignore[call-overload]  # where csv puts the rest
        raise DCFormerError(f"{source}: {', '.join(extra)!r} after the last column: expected one cell a column")
    numbers = {
        name: _number(source, name, row.get(name), least=0.0 if name == "embedding_parameters" else None)
        for name in _NUMBERS
    }
    for name in ("parameters", "tokens", "loss"):
        if numbers[name] is None:
            raise DCFormerError(f"{source}, column {name}: empty, expected a number")
    seed = _number(source, "seed", row.get("seed"), least=0.0) or 0.0
    if seed != int(seed):
        raise DCFormerError(f"{source}, column seed: {seed:g}, expected a whole number")
    loss = _loss(f"{source}, column loss", numbers.pop("loss"), perplexity)
    return _checked(Point(family=family, loss=loss, seed=int(seed), source=source, **numbers))  # type: ignore[arg-type]


def _number(source: str, column: str, text: str | None, least: float | None = None) -> float | None:
    if text is None or not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise DCFormerError(f"{source}, column {column}: {text!r}, expected a number") from None
    if not math.isfinite(value) or (value < least if least is not None else value <= 0):
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise DCFormerError(f"{source}, column {column}: {text.strip()}, expected a finite number {bound}")
    return value


def _checked(point: Point) -> Point:
    """Refuses a run whose compute is not a number."""
    embeddings = point.embedding_parameters
    if embeddings is not None and embeddings >= point.parameters:
        raise DCFormerError(
            f"{point.source}, column embedding_parameters: {embeddings:g}, expected less than parameters, "
            f"{point.parameters:g}; leave it empty where it is not known"
        )
    if not math.isfinite(point.compute("6nd")):
        raise DCFormerError(
            f"{point.source}, column parameters: {point.parameters:g}, times column tokens, {point.tokens:g}, is "
            "beyond 1e308: expected the numbers of a model that was trained"
        )
    return point


def _loss(source: str, value: Any, perplexity: bool) -> float:
    """Nats per token of a loss or a perplexity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise DCFormerError(f"{source}: {value}, expected a finite number above 0; leave out runs that diverged")
    if perplexity:
        if value <= 1:
            raise DCFormerError(f"{source}: {value:g}, expected a perplexity above 1")
        return math.log(value)
    if value > _LARGEST_LOSS:
        raise DCFormerError(
            f"{source}: {value:g} is too much for nats per token: give --perplexity if it is a perplexity"
        )
    return float(value)


# --- outputs of trainers ----------------------------------------------------------------------------------------------


def _of_trainer(folder: Path, state_file: Path, perplexity: bool) -> Point:
    run = state_file.parent
    if run == folder:
        raise DCFormerError(f"{folder} is one run: name the folder above, whose folders are families of runs")
    state = _record(state_file)
    history = _part(state, state_file, "log_history", list)
    last = _part(state, state_file, "global_step", int)
    parameters, embeddings, config = _counted(run)
    tokens = _tokens(state, history, last, run)
    setup = _part(state, state_file, "stateful_callbacks", dict, {})
    for key in ("SetupRecord", "args", "setup"):
        setup = _part(setup, state_file, key, dict, {})
    seed = _part(setup, state_file, "seed", int, _UNKNOWN_SEED)
    length = _part(setup, state_file, "max_length", int | None, None)
    if not _part(setup, state_file, "packing", bool, False):  # rows are as long as they are, and no longer
        length = _mean_length(tokens, history, last)
    elif length is None and config is not None:
        length = config.max_position_embeddings
    point = Point(
        family=run.relative_to(folder).parts[0],
        parameters=parameters,
        tokens=tokens,
        loss=_loss(*_final_loss(history, last, run), perplexity),
        embedding_parameters=embeddings,
        seed=seed,
        source=str(run),
    )
    if config is not None and length is not None:
        point = replace(point, flops=count_training_flops(config, length) * tokens)
    return _checked(point)


def _numbered(points: Iterable[Point]) -> list[Point]:
    """Gives seeds to runs whose trainer recorded none: their number among those of a family and size."""
    found: list[Point] = []
    for point in points:
        if point.seed == _UNKNOWN_SEED:
            size = (point.family, point.parameters)
            point = replace(point, seed=sum((other.family, other.parameters) == size for other in found))
        found.append(point)
    return found


def _record(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DCFormerError(f"{file} cannot be read as a trainer's output: {error}") from error
    if not isinstance(found, dict):
        raise DCFormerError(f"{file} cannot be read as a trainer's output: expected an object, found {found!r:.60}")
    return found


_REQUIRED = object()


def _part(record: Mapping[str, Any], file: Path, key: str, kind: Any, default: Any = _REQUIRED) -> Any:
    value = record.get(key, default)
    if value is _REQUIRED or not isinstance(value, kind):
        found = "is missing" if value is _REQUIRED else f"is {value!r:.60}"
        name = getattr(kind, "__name__", str(kind))
        raise DCFormerError(f"{file} cannot be read as a trainer's output: {key} {found}, expected {name}")
    return value


def _counted(run: Path) -> tuple[int, int, Any]:
    """Parameters of a run's model, those of its embeddings, and its configuration where that tells its operations."""
    file = run / "config.json"
    _record(file)
    with refused(OSError, *CONFIG_ERRORS, what=str(file)):
        config = AutoConfig.from_pretrained(run, local_files_only=True)
    if isinstance(config, DCFormerConfig) and is_of_package(type(config)):
        parameters = count_parameters(config)
        return parameters, num_parameters(config) - num_parameters(config, exclude_embeddings=True), config
    if is_converted(config):
        raise DCFormerError(
            f"{run}: a converted {config.model_type}: config.json does not say what composition adds; write a table of "
            "runs, with all its parameters"
        )
    with refused(OSError, *CONFIG_ERRORS, what=f"{file}: no language model can be counted"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    embeddings = {parameter for end in ends for parameter in end.parameters()}
    return model.num_parameters(), sum(parameter.numel() for parameter in embeddings), None


def _final_loss(history: list[Any], last: int, run: Path) -> tuple[str, Any]:
    """Where the loss after the last step is, and it: of the evaluation after training, or of one at that step."""
    after = run / "eval_results.json"
    if after.exists() and "eval_loss" in (results := _record(after)):
        return f"{after}, eval_loss", results["eval_loss"]
    found = [entry for entry in history if isinstance(entry, dict) and "eval_loss" in entry]
    if not found or found[-1].get("step") != last:
        raise DCFormerError(
            f"{run}: no eval_loss after its last step, {last}: a run needs a loss on held-out rows at its end, in "
            "eval_results.json or in the history of trainer_state.json"
        )
    return f"{run / 'trainer_state.json'}, eval_loss", found[-1]["eval_loss"]


def _mean_length(tokens: float, history: list[Any], last: int) -> int | None:
    """Tokens of a run's mean row, rounded; None where its history does not tell how many rows a step had.

    The speeds that trainers log at their end tell it, as rows and steps a second; both are rounded to thousandths.
    """
    found = [entry for entry in history if isinstance(entry, dict) and "train_steps_per_second" in entry]
    if not found or not last:
        return None
    speeds: list[Any] = [found[-1].get(f"train_{what}_per_second") for what in ("samples", "steps")]
    for speed in speeds:
        if not isinstance(speed, int | float) or not _SLOWEST <= speed < math.inf:
            return None
    rows, steps = speeds
    return max(1, round(tokens * steps / (last * rows)))


def _tokens(state: Mapping[str, Any], history: list[Any], last: int, run: Path) -> float:
    """Tokens that a run was trained on.

    `num_input_tokens_seen` goes on when a run is resumed. TRL's `num_tokens` starts again, so it is summed over the
    processes that trained. One that ended between two entries, or an end without one, is filled up by tokens a step.
    """
    source = run / "trainer_state.json"
    if (seen := state.get("num_input_tokens_seen")) and isinstance(seen, int | float) and math.isfinite(seen):
        return float(seen)
    found = [(0, 0.0)]
    for entry in history:
        if isinstance(entry, dict) and "num_tokens" in entry:
            step, count = entry.get("step"), entry["num_tokens"]
            if not isinstance(step, int) or not isinstance(count, int | float) or not 0 < count < math.inf:
                raise DCFormerError(f"{source}: num_tokens is {count} at step {step}, expected a number above 0")
            if step > found[-1][0]:
                found.append((step, float(count)))
    if len(found) == 1:
        raise DCFormerError(
            f"{source}: no num_tokens in its history: a run needs the number of tokens trained on; train with our "
            "trainers, or with include_num_input_tokens_seen, or write a table of runs"
        )
    pairs = list(pairwise(found))
    rates = [(count - before) / (step - since) for (since, before), (step, count) in pairs]
    rate = median_high(rates)
    total, restarts = 0.0, 0
    for (since, before), (step, count) in pairs:
        steps = step - since
        if before and count <= min(1.25 * steps * rate, steps * rate + before / 2):  # of these steps alone
            missing = max(0, steps - round(count / rate))
            total, restarts = total + count + missing * rate, restarts + 1
        else:
            total += count - before
    if rate <= 0 or max(rates) > (1.5 if restarts else 3) * rate:
        counts = ", ".join(f"{count:.0f}" for _, count in found[1:6])
        raise DCFormerError(
            f"{source}: num_tokens goes {counts}, ...: what this run was trained on cannot be told; write a table of "
            "runs with a column tokens"
        )
    return total + (last - found[-1][0]) * rate


__all__ = ["MEASURES", "Point", "of_family", "read_points"]
