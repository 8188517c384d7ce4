"""Folding: groups of heads become heads, by parameters alone. And back: models of other libraries that do the same.

Nothing here trains. `fold_folder` streams: it holds one tensor at a time. Source: arXiv 2406.06567, section 4.2.
Letters: n heads of a part, G groups of g = n / G, D head dim, E hidden size, H query heads.
"""

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from ..configuration_dcformer import DCFormerConfig
from ..conversion.output import SafetensorsWriter, complete_folder, refuse_to_replace
from ..errors import DCFormerError
from ..files import states_of
from ..loading import LOADING_ERRORS, damaged_file
from ..modeling_dcformer import DHAForCausalLM
from .mixing import Part
from .plan import KINDS, Groups, HeadPlan, as_plan
from .sources import FAMILIES, TARGETS, HeadSource, check_tensors

_PROJECTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.([kv])_proj\.(?:weight|bias)")
_KIND = {"k": "key", "v": "value"}
# Files of a model folder, beside configuration and parameters, that belong to a folded model as well.
_KEPT = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
         "chat_template*", "generation_config.json")  # fmt: skip


def fold_heads(rows: torch.Tensor, groups: Groups, operator: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a projection's heads -> rows of the folded heads: Σ_j diag(ω_m[j]) W_j over the members j of group m.

    Args:
        rows: [n·D, E], or of a bias [n·D].
        groups: [G][g].
        operator: [G, g, D], what each group takes of its members' channels; None for their mean.

    Returns:
        [G·D, E] or [G·D] in the dtype of `rows`, computed in float32 at least and rounded once.
    """
    compute = torch.promote_types(rows.dtype, torch.float32)
    heads = rows.unflatten(0, (sum(map(len, groups)), -1))  # [n, D, E] or [n, D]
    folded = []
    for number, group in enumerate(groups):
        total = torch.zeros_like(heads[0], dtype=compute)
        for place, head in enumerate(group):
            one = heads[head].to(compute)
            if operator is not None:
                share = operator[number, place].to(device=rows.device, dtype=compute)  # [D]
                one = one * share.view(-1, *[1] * (one.ndim - 1))
            total += one
        folded.append((total / len(group) if operator is None else total).to(rows.dtype))
    return torch.cat(folded)


class _Folder:
    """What becomes of each stored tensor of a source, one at a time; shapes and dtypes are known beforehand."""

    def __init__(self, source: HeadSource, plan: HeadPlan, operators: Mapping[Part, torch.Tensor] | None):
        self.source, self.plan, self.operators = source, plan, operators
        self.config = source.folded_config(plan)
        self.announced: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.natives: dict[str, list[str]] = {}  # stored tensor -> those of the folded model in it
        for name, (shape, dtype) in source.infos.items():
            natives = source.natives(name, torch.empty(shape, dtype=dtype, device="meta"))
            self.natives[name] = [*natives]
            for native, tensor in natives.items():
                self.announced[native] = (self._fold(native, tensor).shape, dtype)
        self.additional = source.family.additional(source.config)
        if self.additional:
            dtype = self.announced["model.layers.0.self_attn.q_proj.bias"][1]
            self.announced |= {name: (torch.Size(shape), dtype) for name, shape in self.additional.items()}

    def _fold(self, native: str, tensor: torch.Tensor) -> torch.Tensor:
        if (match := _PROJECTION.fullmatch(native)) is None:
            return tensor
        part = int(match[1]), _KIND[match[2]]
        operator = None if self.operators is None else self.operators[part]
        return fold_heads(tensor, self.plan.groups(*part), operator)

    def fold(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of the folded model in a stored one."""
        natives = self.source.natives(name, self.source.read(name))
        return {native: self._fold(native, tensor) for native, tensor in natives.items()}


def fold_model(
    source: HeadSource, plan: HeadPlan, operators: Mapping[Part, torch.Tensor] | None = None
) -> PreTrainedModel:
    """The folded model of a model in memory; see `from_plan`. Operators are [G, g, D] by part; None means the mean."""
    folder = _Folder(source, plan, operators)
    model_class = type(source.model) if isinstance(source.config, DCFormerConfig) else DHAForCausalLM
    with no_init_weights():
        model: Any = model_class(folder.config)
    state = {name: tensor for stored in source.infos for name, tensor in folder.fold(stored).items()}
    state |= {name: torch.zeros(shape, dtype=folder.announced[name][1]) for name, shape in folder.additional.items()}
    return _with_state(model, {name: tensor.clone() for name, tensor in state.items()}, source.model)


def _with_state(model: Any, state: dict[str, torch.Tensor], like: Any) -> Any:
    """A new model gets its tensors, and device, mode and generation settings of another model."""
    check_tensors(model, {name: tuple(tensor.shape) for name, tensor in state.items()}, type(like).__name__)
    model.load_state_dict(state, strict=False, assign=True)  # not strict: tied embeddings
    model.tie_weights()
    model.generation_config = copy.deepcopy(like.generation_config)
    return model.to(like.device).train(like.training)


def from_plan(
    model: PreTrainedModel | str | os.PathLike, plan: HeadPlan | str | os.PathLike, init: str = "mean"
) -> PreTrainedModel:
    """The folded model by mean pooling of the plan's groups, without training.

    Args:
        model: the source, or its folder, which is loaded.
        plan: for this source, or its file.
        init: "mean", the only way so far.

    Returns:
        `DHAForCausalLM`; of one of this package's models one of the same class.

    Raises:
        DCFormerError: when the plan is for another source, or the model cannot be one or has been fused.
    """
    if init != "mean":
        raise DCFormerError(f"init={init!r} is unknown: expected 'mean'; fuse() trains the mixture instead.")
    if isinstance(model, str | os.PathLike):
        model = load_model(model)
    source, plan = HeadSource(model), as_plan(plan)
    plan.check_source(source.sizes)
    return fold_model(source, plan)


def load_model(folder: str | os.PathLike, dtype: Any = "auto", fused: bool = False) -> PreTrainedModel:
    """The causal language model of a folder that can be a source; which cannot is said before parameters are read."""
    HeadSource(folder, fused)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except LOADING_ERRORS as error:
        raise DCFormerError(f"{os.fspath(folder)}: {damaged_file(folder, error) or error}") from error


def fold_folder(
    model: str | os.PathLike,
    plan: HeadPlan | str | os.PathLike,
    output: str | os.PathLike,
    *,
    operators: Mapping[Part, torch.Tensor] | None = None,
    facts: Mapping[str, Any] | None = None,
    card: Callable[[DCFormerConfig], str] | None = None,
    check: bool = True,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: bool = True,
) -> DCFormerConfig:
    """Folds a model folder into another, a tensor at a time: no model is made, and memory is that of one tensor.

    Interrupted or killed, it leaves a hidden neighbor of the output, from which the same call goes on.

    Args:
        model: folder of the source.
        plan: for this source, or its file.
        output: the folder to create; it appears when complete.
        operators: [G, g, D] of every part, as a fused folder needs them; None pools by the mean.
        facts: what to write beside it as dha.json.
        card: makes the text of a README from the folded configuration.
        check: compare the plan with the source's parameters, not only with its sizes.
        max_shard_size: of a safetensors file.
        overwrite: replace an existing output.
        progress: show a progress bar.

    Returns:
        the folded model's configuration.

    Raises:
        DCFormerError: when the plan is for another source, the source's tensors do not fit its configuration, it has
            been fused and there are no operators, a tensor cannot be read or holds NaN, or the folder cannot be
            written; nothing is left then.
    """
    refuse_to_replace(model, output)
    source, plan = HeadSource(model, fused=operators is not None), as_plan(plan)
    sizes = source.sizes
    if not check:  # it has been trained since
        sizes = replace(sizes, fingerprint=plan.source.fingerprint)
    plan.check_source(sizes)
    folder = _Folder(source, plan, operators)
    total = sum(shape.numel() * dtype.itemsize for shape, dtype in folder.announced.values())
    with complete_folder(output, total, overwrite, _made_from(model, plan, operators, max_shard_size)) as work:
        writer = SafetensorsWriter(work, folder.announced, max_shard_size, resume=True)
        there = sum(s.numel() * dtype.itemsize for s, dtype in (folder.announced[name] for name in writer.written))
        if there and progress:
            print(f"folding continues: {len(writer.written)} of {len(folder.announced)} tensors are written")
        try:
            with tqdm(None, "folding", total, initial=there, unit="B", unit_scale=True, disable=not progress) as bar:
                for stored, natives in folder.natives.items():
                    tensors = folder.fold(stored) if {*natives} - writer.written else {}
                    for name in list(tensors):
                        tensor = tensors.pop(name)
                        if name in writer.written:
                            continue
                        if not tensor.isfinite().all():
                            raise DCFormerError(f"{os.fspath(model)}: {name} holds NaN or infinity: it is damaged.")
                        writer.write(name, tensor)
                        bar.update(tensor.nbytes)
                for name in folder.additional.keys() - writer.written:
                    writer.write(name, torch.zeros(folder.additional[name], dtype=folder.announced[name][1]))
            writer.close()
        finally:
            writer.abort()
        config = folder.config
        config.dtype = folder.announced["model.embed_tokens.weight"][1]
        own = isinstance(source.config, DCFormerConfig)
        config.architectures = source.config.architectures if own else [DHAForCausalLM.__name__]
        config.save_pretrained(work)
        copy_kept(model, work)
        plan.save(work / "plan.json")
        (work / "dha.json").write_text(json.dumps(dict(facts or {}), indent=1) + "\n", encoding="utf-8")
        if card is not None:
            (work / "README.md").write_text(card(config), encoding="utf-8")
    return config


def _made_from(
    model: str | os.PathLike, plan: HeadPlan, operators: Mapping[Part, torch.Tensor] | None, max_shard_size: int | str
) -> str:
    """A digest of all that decides on the tensors of a folded folder; of the source's files their size and time."""
    files = states_of(Path(model).iterdir())
    digest = hashlib.sha256(repr((files, plan.to_json(), max_shard_size)).encode())
    for part, operator in sorted((operators or {}).items()):
        digest.update(repr(part).encode() + operator.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def copy_kept(source: str | os.PathLike, target: Path) -> None:
    """Copies tokenizer, chat template and generation settings of a model folder."""
    for pattern in _KEPT:
        for file in Path(source).glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


# --- models without head maps -----------------------------------------------------------------------------------------


def expand(model: PreTrainedModel) -> PreTrainedModel:
    """The same function without head maps: heads are repeated, and nothing is saved. Runs anywhere.

    Args:
        model: a model of this package with head maps.

    Returns:
        `LlamaForCausalLM`, or Mistral, Qwen3 or GPT-NeoX where the model has their windows, norms or residual; where no
        such model exists, for instance with composition, one of the model's own class.

    Raises:
        DCFormerError: when it has no head maps.
    """
    maps = _head_maps(model)
    heads, n = model.config.num_attention_heads, model.config.num_key_value_heads
    reads = [[head * n // heads for head in range(heads)]] * len(maps["key"])
    shared = all(
        len({pair for pair in zip(read, row, strict=True)}) == n
        for rows in maps.values()
        for read, row in zip(reads, rows, strict=True)
    )
    config: Any = copy.deepcopy(model.config)
    config.key_head_map = config.value_head_map = None
    config.num_key_value_heads = count = n if shared else heads
    state = dict(model.state_dict())
    for name in list(state):
        if match := _PROJECTION.fullmatch(name):
            row = maps[_KIND[match[2]]][int(match[1])]
            repeated = row[:: heads // count]  # the head that the first query head of each group reads
            state[name] = state[name].unflatten(0, (-1, config.head_dim))[repeated].flatten(0, 1)
    return _rebuilt(model, config, state, TARGETS)


def to_gqa(model: PreTrainedModel) -> PreTrainedModel:
    """The same function and the same saving as a plain grouped-query model, for other engines.

    Query heads change places so that those of a key/value head are neighbors: rows of `q_proj`, columns of `o_proj`.

    Args:
        model: from a plan with `tie=True` and equal counts in all layers; without composition.

    Returns:
        `LlamaForCausalLM`, or Mistral or Qwen3 where the model has their windows or norms.

    Raises:
        DCFormerError: when a layer's keys and values differ in their map, or layers in their counts, or no such model
            has the rest: composition, or Qwen2's biases with windows in some layers.
    """
    maps = _head_maps(model)
    heads = model.config.num_attention_heads
    for layer, (keys, values) in enumerate(zip(*maps.values(), strict=True)):
        if keys != values:
            raise DCFormerError(
                f"layer {layer}: keys and values have other groups, which grouped-query attention cannot: search with "
                "tie=True, or use expand()."
            )
    counts = {max(row) + 1 for row in maps["key"]}
    if len(counts) > 1 or any(row.count(head) * max(counts) != heads for row in maps["key"] for head in row):
        raise DCFormerError(
            f"layers have {sorted(counts)} heads, or heads with unequal numbers of queries: a grouped-query model has "
            "one count. Search with tie=True and allocation='uniform', or use expand()."
        )
    config: Any = copy.deepcopy(model.config)
    config.key_head_map = config.value_head_map = None
    config.num_key_value_heads = counts.pop()
    state = dict(model.state_dict())
    for layer, row in enumerate(maps["key"]):
        order = sorted(range(heads), key=lambda head: (row[head], head))
        prefix = f"model.layers.{layer}.self_attn."
        for name in (f"{prefix}q_proj.weight", f"{prefix}q_proj.bias"):
            if name in state:
                state[name] = state[name].unflatten(0, (heads, -1))[order].flatten(0, 1)
        name = f"{prefix}o_proj.weight"
        state[name] = state[name].unflatten(1, (heads, -1))[:, order].flatten(1, 2)
    differing = {name: FAMILIES[name].differing(config) for name in TARGETS if name != "gpt_neox"}
    targets = [name for name, fields in differing.items() if not fields]
    if not targets:
        why = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in differing.items())
        raise DCFormerError(
            f"no plain grouped-query model is this one ({why} differ). Use expand(), which repeats heads."
        )
    return _rebuilt(model, config, state, targets)


def _head_maps(model: Any) -> dict[str, list[list[int]]]:
    config = getattr(model, "config", None)
    if not isinstance(config, DCFormerConfig) or not type(model).__name__.endswith("ForCausalLM"):
        raise DCFormerError(f"{type(model).__name__} is not a language model of this package: fold one first.")
    HeadSource(model)  # refuses one with mixers, among others
    if all(getattr(config, f"{kind}_head_map") is None for kind in KINDS):
        raise DCFormerError("the model has no head maps (key_head_map, value_head_map): it was not folded.")
    layers = range(config.num_hidden_layers)
    return {kind: [list(config.head_map(f"{kind}_head_map", layer)) for layer in layers] for kind in KINDS}


def _rebuilt(model: Any, config: DCFormerConfig, state: dict[str, torch.Tensor], targets: Any) -> Any:
    """The model of the first target that holds a native configuration, or of the model's own class."""
    family = next((FAMILIES[name] for name in targets if FAMILIES[name].holds(config)), None)
    config._attn_implementation = None
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    with no_init_weights():
        if family is None:
            made: Any = type(model)(config)
        else:
            foreign = family.foreign(config)
            foreign.dtype = config.dtype
            made, state = AutoModelForCausalLM.from_config(foreign), family.stored(state, foreign)
    return _with_state(made, {name: tensor.detach().clone() for name, tensor in state.items()}, model)


__all__ = ["expand", "fold_folder", "fold_heads", "fold_model", "from_plan", "load_model", "to_gqa"]
