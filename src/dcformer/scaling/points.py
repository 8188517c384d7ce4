"""Runs as points of compute and loss: from a table, or from the folders that trainers leave."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis import num_parameters, training_flops
from ..configuration_dcformer import DCFormerConfig
from ..errors import DCFormerError

MEASURES = ("6nd", "6nd-nonembed", "flops")
_NUMBERS = ("parameters", "embedding_parameters", "tokens", "flops", "loss")
_NEEDED = ("family", "parameters", "tokens", "loss")
_LARGEST_LOSS = 20.0  # nats; ln(vocabulary) of the largest vocabularies is below 13


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
        raise DCFormerError(f"no run is of family {family!r}: found {names}")
    return found


def read_points(path: str | Path, perplexity: bool = False, mixed_tokens: bool = False) -> list[Point]:
    """Runs from a file or a folder.

    Args:
        path: a CSV file with columns family, parameters, tokens, loss and perhaps embedding_parameters, flops, seed; or
            a folder `<family>/<any name>/` of outputs of our trainers.
        perplexity: losses are perplexities; their logarithm is taken.
        mixed_tokens: runs of one size may differ in tokens; each number of tokens then counts as a size.

    Returns:
        the runs, in no particular order.

    Raises:
        DCFormerError: naming file, row and column, for what is not a run.
    """
    path = Path(path)
    if path.is_dir():
        points = [_of_trainer(path, state, perplexity) for state in _last_states(path)]
    else:
        points = _of_table(path, perplexity)
    if not points:
        raise DCFormerError(f"{path}: no runs: expected rows, or folders with a trainer_state.json and a config.json")
    if not mixed_tokens:
        _check_tokens(points)
    return points


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
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            if missing := [name for name in _NEEDED if name not in columns]:
                raise DCFormerError(f"{path}: no column {missing[0]!r}: expected {', '.join(_NEEDED)}; found {columns}")
            return [_of_row(f"{path}, row {i}", row, perplexity) for i, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DCFormerError(f"{path} cannot be read: {error}") from error


def _of_row(source: str, row: Mapping[str, Any], perplexity: bool) -> Point:
    """A line of a table; rows are counted as editors count lines, the heading is the first."""
    if not (family := (row["family"] or "").strip()):
        raise DCFormerError(f"{source}, column family: empty, expected a name")
    numbers = {name: _number(source, name, row.get(name)) for name in _NUMBERS}
    for name in ("parameters", "tokens", "loss"):
        if numbers[name] is None:
            raise DCFormerError(f"{source}, column {name}: empty, expected a number")
    seed = _number(source, "seed", row.get("seed"), least=0.0)
    loss = _loss(source, numbers.pop("loss"), perplexity)
    return Point(family=family, loss=loss, seed=int(seed or 0), source=source, **numbers)  # type: ignore[arg-type]


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


def _loss(source: str, value: float | None, perplexity: bool) -> float:
    assert value is not None
    if perplexity:
        if value <= 1:
            raise DCFormerError(f"{source}, column loss: {value:g}, expected a perplexity above 1")
        return math.log(value)
    if value > _LARGEST_LOSS:
        raise DCFormerError(
            f"{source}, column loss: {value:g} is too much for nats per token: give --perplexity if it is a perplexity"
        )
    return value


# --- outputs of trainers ----------------------------------------------------------------------------------------------


def _last_states(folder: Path) -> list[Path]:
    """The trainer's state of each run: of its output folder, not of the checkpoints below."""
    return sorted(file for file in folder.rglob("trainer_state.json") if not file.parent.name.startswith("checkpoint-"))


def _of_trainer(folder: Path, state_file: Path, perplexity: bool) -> Point:
    run = state_file.parent
    if run == folder:
        raise DCFormerError(f"{folder} is one run: name the folder above, whose folders are families of runs")
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        fields = json.loads((run / "config.json").read_text(encoding="utf-8"))
        history = state["log_history"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DCFormerError(f"{run} cannot be read as a trainer's output: {error}") from error
    config = DCFormerConfig.from_dict(fields)
    values: dict[str, float] = {}
    for key, meaning in (("eval_loss", "a loss on held-out rows"), ("num_tokens", "the number of tokens trained on")):
        found = [entry[key] for entry in history if key in entry]
        if not found:
            raise DCFormerError(f"{state_file}: no {key} in its history: a run needs {meaning}")
        values[key] = found[-1]
    setup = state.get("stateful_callbacks", {}).get("SetupRecord", {}).get("args", {}).get("setup", {})
    length = setup.get("max_length") or config.max_position_embeddings
    parameters = num_parameters(config)
    return Point(
        family=run.relative_to(folder).parts[0],
        parameters=parameters,
        tokens=values["num_tokens"],
        loss=_loss(str(run), values["eval_loss"], perplexity),
        embedding_parameters=parameters - num_parameters(config, exclude_embeddings=True),
        flops=training_flops(config, length) * values["num_tokens"],
        seed=int(setup.get("seed", 0)),
        source=str(run),
    )


__all__ = ["MEASURES", "Point", "of_family", "read_points"]
