"""The plan of a search: which key heads and which value heads of every layer become one. JSON that a person can edit.

A part is (layer, kind), with kind "key" or "value". The heads of a part are split into groups of equal size; a group
becomes one head of the folded model. Letters: L layers, H query heads, n heads of a part before, G groups, g = n / G.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..errors import DCFormerError
from ..files import write_whole

KINDS = ("key", "value")
FORMAT, VERSION = "dcformer-dha-plan", 1

Groups = list[list[int]]  # of one part: [G][g], members ascending, groups by first member


def canonical(groups: Sequence[Sequence[int]]) -> Groups:
    """The same groups with members ascending, and groups by first member: the order in which they are folded."""
    return sorted(sorted(group) for group in groups)


def consecutive_groups(heads: int, count: int) -> Groups:
    """`heads` heads in `count` groups of neighbors, as grouped-query attention has them."""
    size = heads // count
    return [list(range(first, first + size)) for first in range(0, heads, size)]


@dataclass(frozen=True)
class SourceSizes:
    """What a plan is for.

    Attributes:
        model_type: of the source's configuration.
        num_attention_heads: query heads H.
        head_dim: width D of a head.
        key_heads, value_heads: heads n of every layer: [L].
        key_head_map, value_head_map: the source head that each query head reads: [L][H].
        fingerprint: of the signs of some of the source's parameters, so the same in every dtype; empty in a plan that
            was made without parameters and fits every model of the sizes.
    """

    model_type: str
    num_attention_heads: int
    head_dim: int
    key_heads: list[int]
    value_heads: list[int]
    key_head_map: list[list[int]]
    value_head_map: list[list[int]]
    fingerprint: str

    @property
    def num_layers(self) -> int:
        return len(self.key_heads)

    def heads(self, layer: int, kind: str) -> int:
        """Heads n of a part."""
        return (self.key_heads if kind == "key" else self.value_heads)[layer]

    def head_map(self, layer: int, kind: str) -> list[int]:
        """s(h): the head of the part that each query head reads, [H]."""
        return (self.key_head_map if kind == "key" else self.value_head_map)[layer]

    @property
    def total(self) -> int:
        """Heads of all parts: 2·L·n where all parts are alike."""
        return sum(self.key_heads) + sum(self.value_heads)


@dataclass(frozen=True)
class HeadPlan:
    """Groups of every part, and how they were found.

    Attributes:
        source: what it is for.
        key_groups, value_groups: groups of every layer: [L][G][g].
        kv_ratio: share of the heads that was asked for.
        score, allocation, seed, steps, tie, head_blocks: arguments of `search`.
        costs: of every part, keys and values of a layer in turn: [2·L], in the units of the allocation; where they
            share groups, that of both together at each.
        displacements: of every part, [2·L]: made with parameters, the share of its squared weight that mean
            pooling moves, times n; with score "operator" that of the mixtures' factors (the paper's equation 7).

    Raises:
        DCFormerError: when groups are not equal parts of a part's heads; the message names layer and kind.
    """

    source: SourceSizes
    key_groups: list[Groups]
    value_groups: list[Groups]
    kv_ratio: float
    score: str = "uniform"
    allocation: str = "uniform"
    seed: int = 0
    steps: int = 0
    tie: bool = False
    head_blocks: int = 1
    costs: list[float] = field(default_factory=list)
    displacements: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ratio(self.kv_ratio)
        check_seed(self.seed)
        object.__setattr__(self, "kv_ratio", float(self.kv_ratio))  # JSON knows no numbers of NumPy
        object.__setattr__(self, "seed", int(self.seed))
        for kind in KINDS:
            parts = self.key_groups if kind == "key" else self.value_groups
            if len(parts) != self.source.num_layers:
                raise DCFormerError(
                    f"the plan has {kind} groups of {len(parts)} layers, its source has {self.source.num_layers}: "
                    "give one list of groups per layer."
                )
            for layer, groups in enumerate(parts):
                _check_groups(groups, self.source.heads(layer, kind), f"layer {layer}, {kind} heads", self.head_blocks)
            object.__setattr__(self, f"{kind}_groups", [canonical(groups) for groups in parts])
        for layer in range(self.source.num_layers):
            if self.tie and self.key_groups[layer] != self.value_groups[layer]:
                raise DCFormerError(
                    f"layer {layer}: tie is true, but its key groups and value groups differ: make them equal, or set "
                    "tie to false."
                )

    def groups(self, layer: int, kind: str) -> Groups:
        """The groups of a part."""
        return (self.key_groups if kind == "key" else self.value_groups)[layer]

    @property
    def parts(self) -> Iterator[tuple[int, str, Groups]]:
        """(layer, kind, groups) of every part, keys before values."""
        for layer in range(self.source.num_layers):
            for kind in KINDS:
                yield layer, kind, self.groups(layer, kind)

    @property
    def num_key_heads(self) -> list[int]:
        """Key heads of every layer after folding."""
        return [len(groups) for groups in self.key_groups]

    @property
    def num_value_heads(self) -> list[int]:
        """Value heads of every layer after folding."""
        return [len(groups) for groups in self.value_groups]

    @property
    def kv_saving(self) -> float:
        """Share of the source's key and value heads that the folded model lacks."""
        return 1 - (sum(self.num_key_heads) + sum(self.num_value_heads)) / self.source.total

    def head_map(self, kind: str) -> list[list[int]]:
        """d(h) of every layer, [L][H]: the group of the source head that query head h reads."""
        maps = []
        for layer in range(self.source.num_layers):
            group_of = {head: i for i, group in enumerate(self.groups(layer, kind)) for head in group}
            maps.append([group_of[head] for head in self.source.head_map(layer, kind)])
        return maps

    def check_source(self, sizes: SourceSizes) -> None:
        """Refuses a model that the plan was not made for.

        Raises:
            DCFormerError: naming what differs.
        """
        for name, made_for in asdict(self.source).items():
            found = getattr(sizes, name)
            if found != made_for and (name, made_for) != ("fingerprint", ""):
                shown = "" if "map" in name else f": {made_for} in the plan, {found} in the model"
                raise DCFormerError(
                    f"the plan is for another source: {name} differs{shown}. Search again on this model."
                )

    def to_json(self) -> str:
        """The plan as a person reads and edits it: a line per part."""
        facts: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        facts |= {name: value for name, value in asdict(self).items() if name not in _PER_PART}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
        layers = []
        for layer in range(self.source.num_layers):
            parts = []
            for number, kind in enumerate(KINDS):
                groups = self.groups(layer, kind)
                part: dict[str, Any] = {"heads": len(groups), "groups": groups}
                for name, values in (("cost", self.costs), ("displacement", self.displacements)):
                    if values:
                        part[name] = values[2 * layer + number]
                parts.append(f'     "{kind}": {json.dumps(part)}')
            layers.append("    {\n" + ",\n".join(parts) + "\n    }")
        lines.append('  "layers": [\n' + ",\n".join(layers) + "\n  ]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, name: str = "the plan") -> "HeadPlan":
        """Reads what `to_json` wrote.

        Args:
            text: JSON.
            name: of the file, for messages.

        Raises:
            DCFormerError: when it is not a valid plan.
        """
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise DCFormerError(f"{name} is not a plan: expected JSON with format {FORMAT!r}; search makes one.")
            if (version := content.get("version")) != VERSION:
                raise DCFormerError(f"version {version!r} of plans is not known here: expected {VERSION}.")
            layers = content.pop("layers")
            given = {key: value for key, value in content.items() if key not in ("format", "version", "source")}
            for kind in KINDS:
                for layer, entry in enumerate(layers):
                    groups, heads = entry[kind]["groups"], entry[kind]["heads"]
                    if heads != len(groups):
                        raise DCFormerError(
                            f"layer {layer}, {kind} heads: 'heads' is {heads}, and there are {len(groups)} groups: "
                            "write the number of groups."
                        )
                given[f"{kind}_groups"] = [entry[kind]["groups"] for entry in layers]
            for key in ("cost", "displacement"):
                values = [entry[kind].get(key) for entry in layers for kind in KINDS]
                given[f"{key}s"] = [] if None in values else values
            return cls(source=SourceSizes(**content["source"]), **given)
        except DCFormerError as error:
            raise DCFormerError(f"{name}: {error}") from error
        except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise DCFormerError(f"{name} is not a plan ({type(error).__name__}: {error}): search makes one.") from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes `to_json` to a file, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "HeadPlan":
        """Reads a file that `save` wrote, edited or not.

        Raises:
            DCFormerError: when it cannot be read, or is not a valid plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DCFormerError(f"{path} cannot be read ({error}): give the plan that search wrote.") from error
        return cls.from_json(text, os.fspath(path))


_PER_PART = ("key_groups", "value_groups", "costs", "displacements")


def _check_groups(groups: Any, heads: int, where: str, blocks: int) -> None:
    if not (isinstance(groups, list) and groups and all(isinstance(group, list) and group for group in groups)):
        raise DCFormerError(f"{where}: {groups!r} is not a list of groups, each a list of heads.")
    members = [head for group in groups for head in group]
    for head in members:
        if type(head) is not int or not 0 <= head < heads:
            raise DCFormerError(
                f"{where}: head {head!r} is out of range: expected a whole number from 0 to {heads - 1}."
            )
    if len(members) != len(set(members)) or len(members) != heads:
        counts = {head: members.count(head) for head in range(heads)}
        wrong = next(head for head, count in counts.items() if count != 1)
        raise DCFormerError(f"{where}: head {wrong} is in {counts[wrong]} groups: expected every head in exactly one.")
    if len(sizes := {len(group) for group in groups}) > 1:
        raise DCFormerError(f"{where}: groups of {sorted(sizes)} heads: expected groups of equal size.")
    if blocks < 1 or heads % blocks:
        raise DCFormerError(f"{where}: head_blocks={blocks} does not divide {heads} heads: choose a divisor.")
    size = heads // blocks
    for group in groups:
        if len({head // size for head in group}) > 1:
            raise DCFormerError(f"{where}: group {group} crosses the {blocks} blocks of {size} heads (head_blocks).")


def as_plan(plan: HeadPlan | str | os.PathLike) -> HeadPlan:
    """A plan, or that of a file.

    Raises:
        DCFormerError: when it is neither, or the file is not a plan's.
    """
    if isinstance(plan, str | os.PathLike):
        return HeadPlan.load(plan)
    if not isinstance(plan, HeadPlan):
        raise DCFormerError(f"a {type(plan).__name__} is not a plan: give the HeadPlan that search made, or its file.")
    return plan


def check_seed(seed: int) -> None:
    """Refuses what random generators do not take."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise DCFormerError(f"seed={seed!r} must be a whole number from 0 to 2**32 - 1.")


def check_ratio(kv_ratio: float) -> None:
    """Refuses a ratio outside (0, 1]."""
    if not isinstance(kv_ratio, Real) or isinstance(kv_ratio, bool) or not 0 < kv_ratio <= 1:
        raise DCFormerError(f"kv_ratio={kv_ratio!r} must be above 0 and at most 1: the share of the heads to keep.")


def check_blocks(head_blocks: int) -> None:
    """Refuses what is not a number of blocks."""
    if not isinstance(head_blocks, int) or isinstance(head_blocks, bool) or head_blocks < 1:
        raise DCFormerError(f"head_blocks={head_blocks!r} must be a whole number of at least 1: 1 for no blocks.")


def possible_counts(heads: int, blocks: int = 1) -> list[int]:
    """The numbers of heads that a part of `heads` can be left with: divisors of it that are multiples of `blocks`."""
    return [count for count in range(1, heads + 1) if not heads % count and not count % blocks]


def uniform_count(heads: int, kv_ratio: float, blocks: int = 1) -> int:
    """The largest of `possible_counts` that keeps at most that share of the heads.

    Raises:
        DCFormerError: when there is none.
    """
    check_ratio(kv_ratio)
    check_blocks(blocks)
    possible = possible_counts(heads, blocks)
    fitting = [count for count in possible if count <= kv_ratio * heads + 1e-9]
    if not fitting:
        least = f"at least {possible[0] / heads:.4g}" if possible else ""
        hint = least or f"another head_blocks: {blocks} does not divide {heads}"
        raise DCFormerError(f"kv_ratio={kv_ratio} of {heads} heads is below the fewest heads possible: give {hint}.")
    return fitting[-1]


__all__ = [
    "FORMAT",
    "KINDS",
    "Groups",
    "HeadPlan",
    "SourceSizes",
    "as_plan",
    "canonical",
    "check_blocks",
    "check_ratio",
    "check_seed",
    "consecutive_groups",
    "possible_counts",
    "uniform_count",
]
