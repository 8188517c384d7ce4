"""Models for other tools: a decoding step as a program, and models with head embeddings as plain ones.

One decoding step as a program of `torch.export`: a token in, logits out, the static cache inside as buffers.

    program = export_decoding_step(model, batch_size=1, max_cache_len=512)
    torch.export.save(program, "step.pt2")

The calling convention and the forward pass follow Transformers' recipe (`transformers.integrations.executorch`). Its
cache does not fit: it allocates keys and values as wide as the head dim; ours carry composition weights behind them.
"""

import copy
import warnings
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.integrations.executorch import TorchExportableModuleWithHybridCache

from .cache_dcformer import use_static_layers
from .implementations_dcformer import CHUNKED, DEFAULT_ATTENTION
from .loading import refuse_other_parameters
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
        probe, token = DynamicCache(), torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        model(token, cache=probe)
        layer: Any
        held: Any
        # The model may have fewer layers than the configuration says, and the cache has been made by that.
        for index, (layer, held) in enumerate(zip(self.cache.layers, probe.layers, strict=False)):
            layer.lazy_initialization(held.keys[:, :, :0], held.values[:, :, :0])  # heads and channels, no token
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
            attention implementation or RoPE cannot be exported.
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
    if (model.config.rope_parameters or {}).get("rope_type") == "dynamic":
        raise ValueError(
            "rope_type='dynamic' chooses frequencies by the text's length, on the host: a program of torch.export "
            "cannot hold that. Models with other kinds of RoPE can be exported."
        )
    implementation = model.config._attn_implementation
    if implementation not in (DEFAULT_ATTENTION, CHUNKED, "eager"):  # the default is chunked in programs
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


def plain_model(model: DCFormerForCausalLM) -> PreTrainedModel:
    """A model with head embeddings as one of Transformers' own with separate heads: the same function, and no saving.

    The weight of head i is diag(e_i + 1) W with "mul", its bias (e_i + 1) b; with "add" the weight is W and the bias
    b + e_i (arXiv 2310.07911; docs/mhe.md).

    Args:
        model: a causal model with `head_embeddings`, without composition, and otherwise as a Llama is made.

    Returns:
        `LlamaForCausalLM`; with "add" and without biases `Qwen2ForCausalLM`, which has biases of q, k and v only; with
        `mlp_bias` alone the output projection gets one of zeros. In the dtype of `model`, on its device, with
        parameters of its own.

    Raises:
        TypeError: when `model` is not a causal model of this package.
        ValueError: when the model has no head embeddings, or something that these have not; naming the field, or the
            parameters, as of adapters.
    """
    if not isinstance(model, DCFormerForCausalLM):
        raise TypeError(
            f"model is of type {type(model).__name__}: expected a DCFormerForCausalLM with head_embeddings, as "
            "AutoModelForCausalLM.from_pretrained gives."
        )
    config = model.config
    if config.head_embeddings is None:
        raise ValueError("the model has no head_embeddings: its heads are separate already.")
    refuse_other_parameters(model, DCFormerForCausalLM)
    is_added = config.head_embeddings == "add"
    is_qwen = is_added and not config.attention_bias and not config.mlp_bias
    config_class: Any = Qwen2Config if is_qwen else LlamaConfig
    model_class: Any = Qwen2ForCausalLM if is_qwen else LlamaForCausalLM
    if config.composes:
        raise ValueError(
            f"the model composes its heads (config.composes=True), which {model_class.__name__} cannot: give one that "
            "was trained without composition, all of its compose_pre, compose_post, compose_query, compose_key and "
            "compose_static False."
        )
    wanted = {
        "qk_norm": False,
        "norm_type": "rmsnorm",
        "mlp_type": "gated",
        "mlp_gates": 0,
        "use_parallel_residual": False,
        "rotary_dim": config.head_dim,
        "hidden_dropout": 0,
    }
    for name, value in wanted.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{name}={found} has no counterpart in {model_class.__name__}: expected {value}.")
    if "sliding_attention" in (config.layer_types or ()):
        raise ValueError(
            f"layer_types has 'sliding_attention', but the {model_class.__name__} is made with global layers only: "
            "expected 'full_attention' in all."
        )
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads="
            f"{config.num_attention_heads}, as {config_class.__name__} wants it even with a head_dim: such a model "
            "stays one of this package."
        )
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "rope_parameters", "tie_word_embeddings", "attention_dropout"),
        *("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    fields: dict[str, Any] = {name: copy.deepcopy(getattr(config, name)) for name in names}
    fields |= {"num_key_value_heads": config.num_attention_heads, "rms_norm_eps": config.norm_eps}
    if not is_qwen:
        fields |= {"attention_bias": config.attention_bias or is_added, "mlp_bias": config.mlp_bias}
    plain_config = config_class(**fields)
    with torch.device("meta"):
        plain = model_class(plain_config)
    state: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for prefix in [name.removesuffix("q_embedding") for name in state if name.endswith("q_embedding")]:
        for kind in ("q", "k", "v"):
            e = state.pop(f"{prefix}{kind}_embedding")  # [H, D]
            weight, bias = (state.pop(f"{prefix}{kind}_proj.{part}", None) for part in ("weight", "bias"))
            if is_added:
                state[f"{prefix}{kind}_proj.weight"] = weight.repeat(e.shape[0], 1)  # [H·D, E]
                state[f"{prefix}{kind}_proj.bias"] = (e if bias is None else e + bias).flatten()
            else:
                state[f"{prefix}{kind}_proj.weight"] = ((e + 1)[..., None] * weight).flatten(0, 1)
                if bias is not None:
                    state[f"{prefix}{kind}_proj.bias"] = ((e + 1) * bias).flatten()
        if is_added and not is_qwen and not config.attention_bias:
            state[f"{prefix}o_proj.bias"] = torch.zeros_like(state[f"{prefix}o_proj.weight"][:, 0])
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    plain.model.rotary_emb = type(plain.model.rotary_emb)(plain_config).to(model.device)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.train(model.training)


__all__ = ["DecodingStep", "export_decoding_step", "plain_model"]
