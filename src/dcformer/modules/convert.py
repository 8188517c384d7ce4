"""`convert_attention`: composition of heads in any model of Transformers whose attention goes through its interface.

Nothing is rewritten: attention modules are found (`finding`) and get weight generators as submodules and a hook, and
the model gets an attention implementation (`interface`).
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..compose_dcformer import ComposeSettings
from ..errors import DCFormerError, first_line
from ..shards import refuse_shards
from .dcmha import check_flags, make_generators
from .finding import UNCACHED, Found, find_attention, other_attention
from .interface import Attached, compose_hook

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What composes by default: as in `DCMHA`.
_DEFAULTS = {f.name: f.default for f in fields(ComposeSettings) if f.name.startswith("compose_")} | {
    "compose_act": "gelu"
}
_README = """This model's attention heads are composed (DCMHA). Load it with

    import dcformer
    from transformers import {auto_class}

    model = dcformer.from_pretrained_converted(folder, {auto_class})

`from_pretrained` of Transformers alone would leave the composition out, with a warning about unused parameters.
"""


def all_settings(compose: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of composition, from those that are given."""
    if unknown := sorted(set(compose) - set(_DEFAULTS)):
        raise DCFormerError(f"{', '.join(unknown)} unknown: expected some of {', '.join(_DEFAULTS)}.")
    if (key := compose.get("compose_key", True)) not in (True, False, UNCACHED):
        raise DCFormerError(f"compose_key={key!r} is unknown: expected True, False or {UNCACHED!r}.")
    return _DEFAULTS | dict(compose)


def _checked_dtype(dtype: Any) -> torch.dtype | None:
    """The `dtype` of a conversion, by name or not; None is none."""
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if named is not None and named in _DTYPES:
        return named
    if dtype is None:
        return None
    raise DCFormerError(
        f"dtype={dtype!r} of the generators: expected one of {', '.join(map(str, _DTYPES))}, or leave it out."
    )


def _check_device(device: Any) -> None:
    """Refuses a `device` of a conversion on which nothing can be made."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # an assertion where torch has no CUDA
        raise DCFormerError(
            f"device={device!r} of the generators cannot be used ({first_line(error)}): give one that this machine "
            "has, or leave it out."
        ) from error


def attach(
    model: PreTrainedModel,
    found: list[Found],
    compose: dict[str, Any],
    zero_init: bool,
    handles: list[RemovableHandle],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "dcmha",
) -> None:
    """Gives every module that was found its generators, its hook and the implementation; adds the hooks' `handles`."""
    for one in found:
        for name, settings in one.settings.items():
            generators = make_generators(settings, zero_init)
            like: Any = one.weight  # None only where both are given
            one.module.add_module(name, generators.to(device or like.device, dtype or like.dtype))
            generators.train(one.module.training)
        one.module.compose_call = one.call  # type: ignore[assignment]
        # a part's own copy of a configuration (ViT-MAE, EncoderDecoderModel) is not one that the model would set
        one.module.config._attn_implementation = implementation  # type: ignore[union-attr]
        handles.append(one.module.register_forward_pre_hook(compose_hook, with_kwargs=True))
    model.config.dcmha = Attached(compose)
    model.save_pretrained = partial(_save_pretrained, model)  # type: ignore[method-assign]


def _detach(
    model: PreTrainedModel,
    found: list[Found],
    handles: list[RemovableHandle],
    implementations: list[tuple[Any, str]],
    settings: dict[str, Any] | None,
) -> None:
    """Undoes a conversion that did not succeed: `implementations` are those of every configuration before it, and
    `settings` the model's `config.dcmha`, which a plain load of a converted folder has."""
    for handle in handles:
        handle.remove()
    for one in found:
        for name in (*one.settings, "compose_call"):
            if hasattr(one.module, name):
                delattr(one.module, name)
    if settings is None:
        vars(model.config).pop("dcmha", None)
    else:
        model.config.dcmha = settings
    vars(model).pop("save_pretrained", None)
    for config, implementation in implementations:
        config._attn_implementation = implementation  # and of those below it, which come later


def convert_attention(
    model: PreTrainedModel,
    *,
    zero_init: bool = True,
    example: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    allow_partial: bool = False,
    **compose: Any,
) -> PreTrainedModel:
    """Composes the heads of all attention of a model of Transformers, in place.

    Every attention module gets weight generators (`compose`, or `compose_query` and `compose_key` for cross-attention),
    and the model the attention implementation "dcmha", which is eager; `set_attn_implementation("dcmha_chunked")` uses
    less memory and has no attention maps. The settings are put into `config.dcmha`.

    Args:
        model: any of Transformers, as long as its attention goes through its attention interface. One that is to be
            compiled or sharded (FSDP2) is converted before, and so is one that is to get adapters of PEFT, which then
            save the composition (`modules_to_save=["compose"]`); with adapters already, `save_compose` does.
        zero_init: the model computes at first what it did; see `make_generators`. False: small random parameters.
        example: arguments of the model. It is run on them once, and the conversion undone if that fails.
        device, dtype: of the generators; by default those of the module's projections, and of another dtype only where
            these are quantized. A dtype may be given by its name.
        allow_partial: attention that does not go through the interface stays as it is, and the rest is converted.
            Otherwise such a model is refused. Linear attention and state spaces, which take no softmax, always stay.
        compose: `compose_rank`, `compose_groups`, `compose_pre`, `compose_post`, `compose_query`, `compose_key`,
            `compose_projection`, `compose_gate`, `compose_static`, `compose_act` as in `DCMHA`. Key-wise weights of
            cached keys are in no cache of another model: to generate with one, use `compose_key=False`; or "uncached",
            which leaves out key-wise weights only where keys are cached from step to step, in causal self-attention,
            and has them in encoders and cross-attention.

    Returns:
        `model`.

    Raises:
        DCFormerError: naming module and reason, where attention cannot be converted, or an argument that is none of
            those above. The model is then unchanged.
    """
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model"):  # PEFT's
        raise DCFormerError(
            f"convert_attention takes a model of Transformers, not {type(model).__name__}: give the one inside it, "
            "before torch.compile."
        )
    if example is not None and not isinstance(example, Mapping):
        raise DCFormerError(
            f"example is of type {type(example).__name__}: expected the model's arguments by name, as in "
            "example={'input_ids': ids}."
        )
    check_flags(zero_init=zero_init, allow_partial=allow_partial)
    dtype = _checked_dtype(dtype)
    _check_device(device)
    settings = all_settings(compose)
    found = find_attention(model, settings)
    if not any(of_side.composes for one in found for of_side in one.settings.values()):
        raise DCFormerError("the settings switch all composition off: turn on compose_pre or compose_post, and a side.")
    if not allow_partial and (others := other_attention(model, found)):
        named = [
            f"{paths[0]} ({kind.__name__})" + f" and {len(paths) - 1} more" * (len(paths) > 1)
            for kind, paths in others.items()
        ]
        raise DCFormerError(
            f"{', '.join(named)}: attention that does not go through Transformers' attention interface, and cannot be "
            "converted: convert a part of the model without it, or leave it as it is with allow_partial=True."
        )
    for one in found:
        refuse_shards(one.module, "convert before fully_shard; tensor parallelism cannot divide composed heads")
    are_known = all(one.weight is not None and one.weight.dtype in _DTYPES for one in found)
    for one in found:
        weight_dtype = None if one.weight is None else one.weight.dtype
        is_offloaded = one.weight is not None and one.weight.is_meta
        if dtype is not None and are_known and dtype != weight_dtype:
            raise DCFormerError(
                f"{one.call.path}: dtype={dtype} of the generators, and its projections are {weight_dtype}, as are "
                "the states that both read: leave dtype out, or convert the model's."
            )
        if (is_offloaded or weight_dtype not in _DTYPES) and (device is None or dtype is None):
            what = "offloaded" if is_offloaded else f"quantized ({weight_dtype or 'their weight is not a tensor'})"
            raise DCFormerError(
                f"{one.call.path}: its projections are {what}: pass device and dtype of the generators to "
                "convert_attention."
            )
        if device is not None and torch.device(device).type == "meta" and one.weight is not None and not is_offloaded:
            raise DCFormerError(
                f"{one.call.path}: device={str(device)!r} of the generators, and its projections are on "
                f"{one.weight.device}: leave device out."
            )
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs += [one.module.config for one in found]  # type: ignore[misc]
    implementations = [(config, config._attn_implementation) for config in configs]
    handles: list[RemovableHandle] = []
    before = getattr(model.config, "dcmha", None)
    try:
        attach(model, found, settings, zero_init, handles, device, dtype)
        model.set_attn_implementation("dcmha")
        if example is not None:
            _try(model, found, example)
    except Exception:
        _detach(model, found, handles, implementations, before)
        raise
    return model


def _try(model: PreTrainedModel, found: list[Found], example: Mapping[str, Any]) -> None:
    """Runs a converted model once; every module's attention must have been computed."""
    ran: set[str] = set()
    handles = [
        one.module.register_forward_hook(lambda *_, path=one.call.path: ran.add(path))  # type: ignore[misc]
        for one in found
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(**example)
    except Exception as error:  # whatever a model raises, it is undone and told
        raise DCFormerError(f"the converted {type(model).__name__} does not run on the example: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    if idle := [one.call.path for one in found if one.call.path not in ran]:
        raise DCFormerError(
            f"{', '.join(idle)}: converted, but not used on the example. Give an example that uses all."
        )


def _save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` of a converted model: the library's, and a README that says how to load the folder."""
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if hasattr(model, "get_base_model"):
        warnings.warn(
            f"{save_directory} has the adapters alone, and not the composition: save_compose writes it.", stacklevel=2
        )
        return
    if (readme := Path(save_directory) / "README.md").parent.is_dir() and not readme.exists():
        readme.write_text(_README.format(auto_class=type(model).__name__.removeprefix("FSDP")), encoding="utf-8")


__all__ = ["all_settings", "attach", "convert_attention"]
