"""One decoding step as a program of `torch.export`: a token in, logits out, the static cache inside as buffers.

    program = export_decoding_step(model, batch_size=1, max_cache_len=512)
    torch.export.save(program, "step.pt2")

The calling convention and the forward are those of Transformers' recipe (`transformers.integrations.executorch`). Its
cache does not fit: it allocates keys and values as wide as the head dim; ours carry composition weights behind them.
"""

import warnings
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import StaticCache
from transformers.integrations.executorch import TorchExportableModuleWithHybridCache

from .cache_dcformer import use_static_layers
from .compose_dcformer import DEFAULT_ATTENTION
from .modeling_dcformer import DCFormerForCausalLM

_BUFFERS = {"key_cache": "keys", "value_cache": "values", "cumulative_length": "cumulative_length"}


class DecodingStep(TorchExportableModuleWithHybridCache):
    """A causal model with a static cache of its own: `step(input_ids [B, 1], cache_position=[position])` -> [B, 1, V].

    Local layers keep their window only. Position 0 begins a new sequence; each further call uses the next position.
    """

    def __init__(self, model: DCFormerForCausalLM, batch_size: int, max_cache_len: int):
        nn.Module.__init__(self)  # not the recipe's: see the module's docstring
        config: Any = model.config  # sizes are Optional only until __post_init__
        self.model = model
        self.cache = StaticCache(config=config, max_cache_len=max_cache_len)
        use_static_layers(self.cache, config.sliding_window)
        layer: Any
        for index, layer in enumerate(self.cache.layers):
            shapes = ((config.cached_heads(s, index), 0, config.cache_width(s, index)) for s in ("pre", "post"))
            key, value = (torch.zeros(batch_size, *shape, dtype=model.dtype, device=model.device) for shape in shapes)
            layer.lazy_initialization(key, value)
            for name, attribute in _BUFFERS.items():
                self.register_buffer(f"{name}_{index}", getattr(layer, attribute), persistent=False)


def export_decoding_step(
    model: DCFormerForCausalLM, batch_size: int = 1, max_cache_len: int | None = None
) -> torch.export.ExportedProgram:
    """Exports one decoding step with a static cache.

    Args:
        model: a causal model in eval mode, with a torch attention implementation ("dcformer_chunked", which is the
            default's too, or "eager").
        batch_size: B, fixed in the program. All sequences of a batch have the same length, as there is no padding mask.
        max_cache_len: S, the most tokens of a sequence; by default `max_position_embeddings`.

    Returns:
        The program. `program.module()(input_ids=[B, 1] int64, cache_position=[1] int64)` returns logits [B, 1, V] in
        the model's dtype, and keeps the keys and values of the tokens so far. A prompt goes in token by token; position
        0 begins anew. Positions must follow each other and stay below S: the program does not check.

    Raises:
        TypeError: when `model` is not a causal model of this package.
        ValueError: when a size is below 1 or beyond the model's context, the model is in training mode, or its
            attention implementation cannot be exported.
    """
    if not isinstance(model, DCFormerForCausalLM):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a DCFormerForCausalLM or DCPythiaForCausalLM, as "
            "AutoModelForCausalLM.from_pretrained gives."
        )
    context = model.config.max_position_embeddings
    length = context if max_cache_len is None else max_cache_len
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if not 1 <= length <= context:
        raise ValueError(
            f"max_cache_len={length} must be from 1 to the model's max_position_embeddings={context}: the model does "
            "not know later positions."
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first.")
    implementation = model.config._attn_implementation
    if implementation not in (DEFAULT_ATTENTION, "dcformer_chunked", "eager"):  # the default is chunked in programs
        raise ValueError(
            f"attn_implementation={implementation!r} launches kernels that a program of torch.export cannot hold: call "
            'model.set_attn_implementation("dcformer_chunked") first.'
        )
    device = model.device
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(batch_size, 1, dtype=torch.long, device=device),
        "cache_position": torch.zeros(1, dtype=torch.long, device=device),
    }
    with torch.no_grad(), warnings.catch_warnings():
        # attributes change while torch traces: a flag of the cache layer, the stack of output capturing
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        return torch.export.export(DecodingStep(model, batch_size, length), args=(), kwargs=inputs, strict=True)


__all__ = ["DecodingStep", "export_decoding_step"]
