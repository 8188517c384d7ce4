"""`to_head_system`: from a plain checkpoint to a model with a head system, which is trained further."""

import copy
from typing import Any

import torch
from torch import nn

from ..loading import refuse_other_parameters
from ..modeling_dcformer import DCFormerForCausalLM, DCFormerForSequenceClassification, DCFormerModel
from ..shards import refuse_shards
from .configuration_head_systems import HeadSystemsConfig, own_head_fields
from .modeling_head_systems import HeadSystemsForCausalLM, HeadSystemsForSequenceClassification, HeadSystemsModel
from .registry import system_class
from .talking_heads import SETTINGS

_CLASSES: dict[type, Any] = {
    DCFormerForCausalLM: HeadSystemsForCausalLM,
    DCFormerForSequenceClassification: HeadSystemsForSequenceClassification,
    DCFormerModel: HeadSystemsModel,
}


@torch.no_grad()
def to_head_system(model: Any, name: str, **options: Any) -> Any:
    """A model with a head system that has the parameters of a DCFormer, composed or plain.

    Exact, that is with the logits of `model` in evaluation: "plain"; "talking_heads"; "collaborative" at its full
    number of shared dims; "overlapped" at 0; "mixture_of_heads" in the form "code" with all routed heads taken;
    "output_gate" with scale 2, which is the default here; "head_pruning" before heads are removed.

    Args:
        model: a `DCFormerForCausalLM`, `DCFormerForSequenceClassification` or `DCFormerModel`, or DCPythia's.
        name: the system.
        options: the system's.

    Returns:
        a new model with memory of its own, on the device and in the dtype and mode of `model`, with its settings of
        generation. Parameters that are copied as they are keep `requires_grad`.

    Raises:
        TypeError: on a model of another kind.
        ValueError: on an unknown system, on options that do not fit, and where the system cannot be made from it, as
            talking heads from query- or key-wise composition, which they do not have. A model that has a
            head system already is refused by the name of both; adapters, parametrizations, modules of subclasses
            and shards of FSDP2 by theirs.
    """
    source_class = next((kind for kind in (*_CLASSES.values(), *_CLASSES) if isinstance(model, kind)), None)
    if source_class is None:
        raise TypeError(
            f"model is a {type(model).__name__}: expected a causal language model, sequence classifier or decoder of "
            "DCFormer or DCPythia."
        )
    if (own := getattr(model.config, "head_system", None)) is not None and own != "plain":
        raise ValueError(
            f"the model has head_system={own!r}: {name!r} is made from a plain one, not from another system."
        )
    if lost := own_head_fields(model.config):
        raise ValueError(
            f"the model has {' and '.join(lost)}, of attention without a head system: what they do to its heads "
            "would be lost. Give a model that does not have them."
        )
    refuse_shards(model, "convert it before that")
    refuse_other_parameters(model, source_class)
    defaults = system_class(name).options_class.for_conversion(has_lost_biases=False)  # there is RoPE
    fields = model.config.to_dict()
    for key in ("model_type", "architectures", "dtype", "transformers_version", "head_system", "head_system_options"):
        fields.pop(key, None)
    if name == "talking_heads":
        if generators := model.config.compose_generators:
            branches = ", ".join(f"compose_{stage} by {branch}" for stage, branch in generators)
            raise ValueError(
                f"the model composes by queries and keys ({branches}): talking heads are static composition alone, and "
                "this would be lost. To drop it, load the model with compose_query=False and compose_key=False."
            )
        stages = {"compose_pre": True, "compose_post": True}
        is_composed = model.config.compose_pre or model.config.compose_post
        fields |= SETTINGS | ({} if is_composed else stages)
    config = HeadSystemsConfig(**fields, head_system=name, head_system_options=defaults | options)
    given = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
    made: Any = _CLASSES.get(source_class, source_class)._from_config(config, **given).to(model.device)
    state = {key: value for key, value in model.state_dict().items() if ".self_attn." not in key}
    made.load_state_dict(state, strict=False)
    for source, target in zip(model.base_model.layers, made.base_model.layers, strict=True):
        _convert(source.self_attn, target.self_attn)
    made.tie_weights()
    sources = {key.replace(".system.", "."): parameter for key, parameter in model.named_parameters()}
    for key, parameter in made.named_parameters():
        source = sources.get(key.replace(".system.", "."))
        if source is not None and source.shape == parameter.shape:  # copied as it is
            parameter.requires_grad_(source.requires_grad)
    if made.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    return made.train(model.training)


def _convert(source: Any, target: Any) -> None:
    """Fills a layer's attention from that of a DCFormer."""
    holder = getattr(source, "system", source)  # plain attention of "dcformer_heads"
    target.o_proj.weight.copy_(target.system.from_mha(holder.q_proj, holder.k_proj, holder.v_proj, source.o_proj))
    if source.o_proj.bias is not None:
        target.o_proj.bias.copy_(source.o_proj.bias)
    for name in ("q_norm", "k_norm"):
        getattr(target, name).load_state_dict(getattr(source, name).state_dict())
    state = source.compose.state_dict()
    for name, parameter in target.compose.named_parameters():
        if name in state:
            parameter.copy_(state[name])
        else:
            nn.init.zeros_(parameter)  # static projections of talking heads: the identity


__all__ = ["to_head_system"]
