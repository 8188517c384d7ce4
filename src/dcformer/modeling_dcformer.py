"""DCFormer and DCPythia models: Transformers whose attention heads are composed dynamically (arXiv 2405.08553).

The shape of the file is that of any Transformers model. What is particular to DCFormer is in `DCFormerAttention`:
composition weights are made from the layer's normalized hidden states, those of the keys ride in the cache behind the
keys and values they belong to, and the attention implementation mixes the heads with them.
Letters: B batch, T queries, S keys, N either, H query heads, Hkv key/value heads, H(kv) either, D head dim, E hidden
size, F MLP width, V vocabulary.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MODEL_MAPPING, AutoModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import (
    TRANSFORMERS_DYNAMIC_MODULE_NAME,
    TransformersKwargs,
    auto_docstring,
    can_return_tuple,
    logging,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .arguments_dcformer import (
    check_cache,
    check_input_shapes,
    check_mask_length,
    check_packing,
    look_up,
    refuse_missing_layers,
)
from .attention_dcformer import (
    LOAD_EAGER,
    ComposeTrace,
    attend_without_autocast,
    check_trace,
    eager_attention,
    refuse_without_composition,
    runs_twice,
    why_no_trace,
)
from .cache_dcformer import (
    CACHE_NAME,
    CACHE_NAMES,
    Room,
    check_cache_names,
    check_cache_rows,
    lend_room,
    takes_cache,
    use_growing_layers,
)
from .chunked_dcformer import CHUNKED  # importing it registers it
from .compose_dcformer import (
    ComposeWeights,
    DCFormerCompose,
    Generated,
    SideWeights,
    accumulation_dtype,
    compose_init_std,
    init_compose,
    stages,
)
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig, DHAConfig
from .fusion_dcformer import FusableAttention, FusableModel
from .generation_dcformer import DCFormerGenerationMixin
from .heads_dcformer import (
    EMBEDDING_NAMES,
    MAP_FIELDS,
    HeadMap,
    add_value_bias,
    apply_rotary,
    embed,
    embedding_init_std,
    head_maps,
    shared_scores,
    unrotated_scores,
    with_ones,
)
from .hub_dcformer import IGNORED_ON_LOAD, load_hub_folder, register_hub_conversions, with_hub_config
from .implementations_dcformer import (
    DEFAULT_ATTENTION,
    FUSED_ATTENTION,
    LayerKernels,
    can_compose,
    check_implementation,
    default_implementation,
    layer_kernels,
)
from .masks_dcformer import causal_rows
from .parallel_dcformer import check_tensor_parallel
from .stored_dcformer import check_stored_heads, naming_damage

logger = logging.get_logger(__name__)


class DCFormerRMSNorm(nn.Module):
    """Root-mean-square norm with scale over the last dimension; computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size] in the dtype that `x` and the scale promote to, as in Llama."""
        wide = F.rms_norm(x.to(accumulation_dtype(x.dtype)), self.weight.shape, eps=self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class DCFormerLayerNorm(nn.LayerNorm):
    """Layer norm with scale and bias over the last dimension; computed in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size] in the dtype of `x`."""
        compute = accumulation_dtype(x.dtype)
        weight, bias = self.weight.to(compute), self.bias.to(compute)
        return F.layer_norm(x.to(compute), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def _make_norm(config: DCFormerConfig) -> nn.Module:
    norm_class = DCFormerRMSNorm if config.norm_type == "rmsnorm" else DCFormerLayerNorm
    return norm_class(config.hidden_size, eps=config.norm_eps)


class DCFormerRotaryEmbedding(nn.Module):
    """Cosines and sines of RoPE for the channels of a head that it rotates, the first `rotary_dim`."""

    def __init__(self, config: DCFormerConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init(config)
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "DCFormerRotaryEmbedding":
        """Moves the module, whose frequencies keep their dtype: rounded, they would rotate late tokens elsewhere."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, exact in before.items():
            if (moved := getattr(self, name)).dtype != exact.dtype:
                setattr(self, name, exact.to(moved.device))
        return self

    @staticmethod
    def compute_default_rope_parameters(config: DCFormerConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [rotary_dim / 2] in float32, and the scaling of the default RoPE (1)."""
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0  # rounded as in the library's models

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Position ids [B or 1, T] -> cosine and sine [B or 1, T, rotary_dim] in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat([angles, angles], dim=-1)
        return (
            (angles.cos() * self.attention_scaling).to(x.dtype),
            (angles.sin() * self.attention_scaling).to(x.dtype),
        )


class DCFormerMLP(nn.Module):
    """Gated (SwiGLU), plain, or multi-gate feed-forward layer."""

    def __init__(self, config: DCFormerConfig):
        super().__init__()
        e, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(e, f, bias=bias) if config.mlp_type == "gated" else None
        self.up_proj = nn.Linear(e, f, bias=bias)
        self.down_proj = nn.Linear(f, e, bias=bias)
        self.multi_gate_proj = nn.Linear(e, config.mlp_gates, bias=False) if config.mlp_gates else None
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, E] -> [B, T, E]."""
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)  # [B, T, F]
        if self.multi_gate_proj is not None:
            gates = self.multi_gate_proj(x).softmax(dim=-1, dtype=accumulation_dtype(x.dtype)).to(x.dtype)
            hidden = hidden.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]  # [B, T, gates, F / gates]
            hidden = hidden.flatten(-2)
        return self.down_proj(hidden)


class Projected(NamedTuple):
    """What the hidden states of a layer are projected to.

    Attributes:
        query, key, value: [B, H(kv), T, D].
        results: where projections are fused, that of each of `DCFormerAttention.projections`, [B, T, rows], or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    results: Sequence[torch.Tensor | None] = ()


class DCFormerAttention(FusableAttention):
    """Dynamically composable multi-head attention (paper section 3).

    Variants keep `forward`, which composes and sees to the cache, and override those of its steps in which they differ:
    `_project`, `_normalize`, `_place`, `_attend`, `_output`.
    """

    own_steps: frozenset[str] = frozenset()  # that a subclass overrides: fused kernels must not take their place
    compose_class: type[DCFormerCompose] = DCFormerCompose  # a variant's subclass names its own
    head_embeddings: str | None = None  # `HeadEmbeddingAttention` has them
    keeps_shapes = True  # queries, keys and values have those of plain attention, for which there are kernels

    # DeepSpeed's ZeRO-3 gathers all parameters in here as one. Module by module it would gather them for the backward
    # pass by the tensors that a module returns, and find none in the `SideWeights` of `DCFormerCompose`.
    _z3_leaf = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = ("_project", "_normalize", "_place", "_attend", "_output")
        cls.own_steps = frozenset(n for n in names if getattr(cls, n) is not getattr(DCFormerAttention, n))

    def __init__(self, config: DCFormerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.key_heads, self.value_heads = head_maps(config, layer_idx)
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        heads, bias = config.num_attention_heads, config.attention_bias
        key_heads, value_heads = (config.cached_heads(stage, layer_idx) for stage in ("pre", "post"))
        query_heads = heads if config.head_embeddings is None else 1  # the seed
        self.num_key_value_groups = heads // key_heads  # for Transformers' attention functions; see `_attend`
        self.q_proj = nn.Linear(config.hidden_size, query_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.qk_norm else nn.Identity()
        self.compose = self.compose_class(config, layer_idx, self.key_heads, self.value_heads)

    @property
    def is_causal(self) -> bool:
        """Whether a query sees no later key where no mask says what it sees. It is the configuration's."""
        return getattr(self.config, "is_causal", True)

    @is_causal.setter
    def is_causal(self, value: bool) -> None:
        raise AttributeError("is_causal is the configuration's, of all layers: set model.config.is_causal.")

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Channels of a cached key and of a cached value, without composition weights."""
        return self.config.cached_head_dim("pre"), self.config.cached_head_dim("post")

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
        layer_idx: int | None = None,
        sliding_window: int | None = None,
        attn_implementation: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, E] -> output [B, T, E] and, from the eager implementation, composed weights [B, H, T, S].

        What the model decides for all its layers is passed down: a layer may come from another model.

        Args:
            hidden_states: [B, T, E], normalized.
            position_embeddings: cosines and sines of RoPE, each [B or 1, T, rotary_dim].
            attention_mask: what each query sees, its window included, as the implementation's mask function made it for
                layers of this kind; None for causal attention, inside `sliding_window`.
            cache: of keys and values, which is updated.
            layer_idx: the layer's place in the cache; `self.layer_idx` when not given.
            sliding_window: keys that a query sees, its own included, for functions that do not learn it from the mask;
                None for all.
            attn_implementation: for which the mask was made; the configuration's when not given.
        """
        implementation = attn_implementation or self.config._attn_implementation
        layer_idx = self.layer_idx if layer_idx is None else layer_idx
        is_cached = cache is not None

        is_fused = self.fused is not None and "_project" not in self.own_steps
        product = self.fused_product(hidden_states) if is_fused else None
        projected = Projected(*self._project(hidden_states)) if product is None else None
        if implementation == DEFAULT_ATTENTION:  # decided where the tensors are
            projected = projected or self._split(product)
            implementation = default_implementation(self, hidden_states, projected.query, projected.key, attention_mask)
        takes_kernels = is_fused and is_cached and not self.own_steps  # a variant's steps would not be asked
        kernels = layer_kernels(implementation) if takes_kernels else None
        if kernels is not None and kwargs.get("compose_trace") is None:
            lend = partial(lend_room, cache, layer_idx)
            masking = (attention_mask, sliding_window, kwargs.get("is_causal"))
            output = self._step(kernels, hidden_states, product, position_embeddings, lend, masking)
            if output is not None:
                return self.o_proj(output.flatten(2)), None  # as `_output` does, which is not a variant's here

        projected = projected or self._split(product)
        made = None if kernels is None else kernels.prepare(self, hidden_states, projected.results, position_embeddings)
        if made is None:
            made = self._new_states(hidden_states, projected, position_embeddings, implementation, is_cached)
        query, key, value, generated = made
        if cache is not None:
            heads = query.shape[1] if self.keeps_shapes else None
            gather = implementation not in FUSED_ATTENTION or heads is None  # kernels read them where they are
            key, value, of_keys = self._update_cache(key, value, cache, layer_idx, heads, gather)
            generated = (generated[0] | of_keys, generated[1])
        pre, post = stages(self.compose, generated)

        output, weights = self._attend(
            implementation,
            query,
            key,
            value,
            attention_mask,
            sliding_window=sliding_window,
            is_cached=is_cached,
            pre=pre,
            post=post,
            **kwargs,
        )
        return self._output(output, hidden_states, projected.query), weights

    def _step(
        self,
        kernels: LayerKernels,
        hidden_states: torch.Tensor,
        product: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        lend: Callable[..., Room | None],
        masking: tuple[Any, int | None, bool | None],
    ) -> torch.Tensor | None:
        """All that comes before the output, new rows in the cache among it, by kernels for few tokens.

        Args:
            kernels: those of the implementation.
            hidden_states, position_embeddings: as for `forward`.
            product: of the fused projections, [B, T, all rows].
            lend: `lend_room` of the layer's place in the cache.
            masking: `attention_mask`, `sliding_window` and `is_causal` of the call.

        Returns:
            [B, T, H, D]; or None where the kernels cannot, and nothing has been done.
        """
        stepped = kernels.step(self, hidden_states, product, position_embeddings, lend, *masking)
        if stepped is None:
            return None
        output, room = stepped
        room.count(hidden_states.shape[1])
        return output

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, T, E] -> queries, keys and values [B, H(kv), T, D]."""
        return (
            self._by_head(self.q_proj(hidden_states)),
            self._by_head(self.k_proj(hidden_states)),
            self._by_head(self.v_proj(hidden_states)),
        )

    def _split(self, product: torch.Tensor | None) -> Projected:
        """Takes the fused product [B, T, all rows] apart."""
        results: Any = self.fused.split(product)
        query, key, value = (self._by_head(states) for states in results[:3])
        return Projected(query, key, value, results)

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, H(kv) D] -> [B, H(kv), T, D]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _new_states(
        self,
        hidden_states: torch.Tensor,
        projected: Projected,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        implementation: str,
        is_cached: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Generated]:
        """Queries, keys and values from those projected, and the composition weights of their tokens.

        Returns:
            queries [B, H, T, D]; keys and values [B, H(kv), T, D], and for a cache with their key-wise weights behind
            them, [B, H(kv), T, D + channels]; and what `DCFormerCompose.forward` returns.
        """
        query, key, value, results = projected
        query, key, value = self._place(query, key, value, position_embeddings, is_cached)
        first_layer = results[3:]  # what a fused product has of composition
        if not is_cached:
            return query, key, value, self.compose(hidden_states, implementation, first_layer)
        return query, *self.compose.packed(hidden_states, key, value, implementation, first_layer)

    def _update_cache(
        self, key: torch.Tensor, value: torch.Tensor, cache: Cache, layer_idx: int, heads: int | None, gather: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, str], SideWeights]]:
        """Puts the rows of new tokens into a cache, and takes those of all tokens apart.

        Args:
            key, value: [B, H(kv), T, D + channels], as `_new_states` returns them for a cache.
            cache, layer_idx: as for `forward`.
            heads, gather: as for `DCFormerCompose.unpack`.

        Returns:
            keys and values [B, H(kv), S, D], and the key-wise weights of all S keys, (stage, "key") -> `SideWeights`.
        """
        key_width, value_width = widths = self.cache_widths
        if layer_idx == 0:
            check_cache_rows(cache, key, value, widths, self.head_dim)
        key, value = cache.update(key, value, layer_idx)
        key, pre_key = self.compose.unpack(key, key_width, "pre", gather, heads)
        value, post_key = self.compose.unpack(value, value_width, "post", gather, heads)
        sides = {("pre", "key"): pre_key, ("post", "key"): post_key}
        return key, value, {at: side for at, side in sides.items() if side is not None}

    def _normalize(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [B, H(kv), T, D] of `_project`, each head normalized."""
        return (
            self.q_norm(query.transpose(1, 2)).transpose(1, 2),
            self.k_norm(key.transpose(1, 2)).transpose(1, 2),
        )

    def _place(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        is_cached: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [B, H(kv), T, D] of `_project`, normalized and rotated by their positions."""
        query, key = self._normalize(query, key)
        return apply_rotary(query, *rope), apply_rotary(key, *rope), value

    def _attend(
        self,
        implementation: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        sliding_window: int | None,
        is_cached: bool,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Calls the attention function with keys and values in the form that it takes.

        Args:
            implementation: its name.
            query, key, value: [B, H, T, D], and [B, Hkv, S, D] with the numbers of heads that the layer has.
            attention_mask, sliding_window: as for `forward`.
            is_cached: keys and values come from a cache.
            kwargs: `pre` and `post`, and those of `forward`.

        Returns:
            output [B, T, H, D], and the weights [B, H, T, S] or None.
        """
        keys, values = self.key_heads, self.value_heads
        has_maps = keys is not None and values is not None
        # Equal and consecutive maps are grouped-query attention: no copies are kept for the backward pass.
        if has_maps and not (keys.is_consecutive and keys.heads == values.heads):
            if implementation in ("eager", CHUNKED):  # which read each head once
                kwargs |= {"key_heads": keys, "value_heads": values}
            else:
                key, value = keys.gather(key), values.gather(value)  # [B, H, S, D]
        if not can_compose(implementation):
            attention_mask = self._for_library(implementation, query, key, attention_mask, sliding_window, **kwargs)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        return attend_without_autocast(
            attention_interface,
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            sliding_window=sliding_window,
            **kwargs,
        )

    def _for_library(
        self,
        implementation: str,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: Any,
        sliding_window: int | None,
        pre: ComposeWeights | None = None,
        post: ComposeWeights | None = None,
        compose_trace: ComposeTrace | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> Any:
        """What Transformers' own attention functions need of a layer. Arguments as for the attention functions.

        Returns:
            the mask; made for sdpa where it would not learn of the window.

        Raises:
            ValueError: where something is composed or traced, which they cannot do.
        """
        refuse_without_composition(implementation, pre, post)
        if compose_trace is not None:
            raise ValueError(why_no_trace(implementation))
        groups = query.shape[1] // key.shape[1]
        if self.num_key_value_groups != groups:
            self.num_key_value_groups = groups
        is_causal = self.is_causal if is_causal is None else is_causal
        reads_no_window = implementation == "sdpa" and attention_mask is None and sliding_window is not None
        if reads_no_window and is_causal and key.shape[2] > sliding_window:
            return causal_rows(query.shape[2], key.shape[2], sliding_window, query.device)[:, None]
        return attention_mask

    def _output(self, output: torch.Tensor, hidden_states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] of the heads -> [B, T, E]; variants may read the hidden states and the queries of `_project`."""
        return self.o_proj(output.flatten(2))


class HeadEmbeddingAttention(DCFormerAttention):
    """Attention whose heads share one projection and differ by embeddings (MHE, arXiv 2310.07911).

    Queries, keys and values are projected once, to seeds [B, 1, T, D]; each head makes its own of them. From a cache
    the seeds are attended as they are: keys are wider by the rotary channels, and serve all heads. See docs/mhe.md.
    """

    q_embedding: nn.Parameter  # [H, D], as the others
    k_embedding: nn.Parameter
    v_embedding: nn.Parameter

    def __init__(self, config: DCFormerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.head_embeddings = config.head_embeddings
        for name in EMBEDDING_NAMES:
            embeddings = nn.Parameter(torch.empty(config.num_attention_heads, self.head_dim))
            self.register_parameter(name, embeddings)

    def _place(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        is_cached: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [B, H, T, D] of all heads from seeds [B, 1, T, D], by the definition.

        For a cache, keys are [B, 1, T, D + r], queries [B, H, T, D + r], and values stay seeds.
        """
        mode = self.head_embeddings
        query, key = self._normalize(query, key)
        query = apply_rotary(embed(query, self.q_embedding, mode), *rope)
        if is_cached:
            return *shared_scores(query, key, self.k_embedding, rope, mode), value
        key = apply_rotary(embed(key, self.k_embedding, mode), *rope)
        return query, key, embed(value, self.v_embedding, mode)

    def _attend(
        self,
        implementation: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        is_cached: bool,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `DCFormerAttention` has it; what embeddings make of shared values follows behind their sums."""
        adds = is_cached and self.head_embeddings == "add"
        takes_bias = implementation in ("eager", CHUNKED)
        if adds:
            pre = kwargs.get("pre")
            is_seen = (pre is not None and pre.key is not None) or kwargs.get("compose_trace") is not None
            if is_seen:  # else softmax takes it out again: it is the same for all keys
                rest = unrotated_scores(query[..., : self.head_dim], self.k_embedding, self.config.rotary_dim)
                query, key = torch.cat([query, rest], dim=-1), with_ones(key)
            if takes_bias:
                kwargs["value_bias"] = self.v_embedding
            else:
                value = with_ones(value)
        if "flash" in implementation:  # which takes one width
            value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        output, weights = super()._attend(
            implementation, query, key, value, attention_mask, is_cached=is_cached, **kwargs
        )
        if adds and not takes_bias:
            output = add_value_bias(output, self.v_embedding)
        output = output[..., : self.head_dim]
        if is_cached and self.head_embeddings == "mul":
            output = output * (self.v_embedding + 1)
        return output, weights


def attention_class_of(config: DCFormerConfig) -> type[DCFormerAttention]:
    """The attention module that a configuration asks for."""
    return DCFormerAttention if config.head_embeddings is None else HeadEmbeddingAttention


class DCFormerDecoderLayer(GradientCheckpointingLayer):
    """One layer: attention and MLP, each behind a norm, in sequence or in parallel."""

    attention_class: type[nn.Module] = DCFormerAttention  # a variant's subclass of the layer names its own

    def __init__(self, config: DCFormerConfig, layer_idx: int):
        super().__init__()
        self.parallel_residual = config.use_parallel_residual
        attention_class = self.attention_class
        if attention_class is DCFormerAttention:
            attention_class = attention_class_of(config)
        elif config.head_embeddings is not None:
            name = attention_class.__name__
            raise ValueError(f"head_embeddings={config.head_embeddings!r} do not go with {name}: choose one of them.")
        self.self_attn = attention_class(config, layer_idx)
        self.mlp = DCFormerMLP(config)
        self.input_layernorm = _make_norm(config)
        self.post_attention_layernorm = _make_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    # Checkpointing serves the backward pass. It drops the cache, which `generate` needs while a model is in training.
    _checkpoints = False

    @property
    def gradient_checkpointing(self) -> bool:  # type: ignore[override]  # an attribute of the library's class
        """Whether the layer is computed again in the backward pass: switched on, and there is a backward pass."""
        return self._checkpoints and torch.is_grad_enabled()

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, switched_on: bool) -> None:
        self._checkpoints = switched_on

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[B, T, E] -> [B, T, E]."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        summed = hidden_states + self.dropout(attended)
        mlp_input = hidden_states if self.parallel_residual else summed
        return summed + self.dropout(self.mlp(self.post_attention_layernorm(mlp_input)))


@auto_docstring
class DCFormerPreTrainedModel(FusableModel, PreTrainedModel):
    config: DCFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DCFormerDecoderLayer"]
    _skip_keys_device_placement = [*CACHE_NAMES]
    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = IGNORED_ON_LOAD
    _can_record_outputs = {"hidden_states": DCFormerDecoderLayer, "attentions": DCFormerAttention}
    takes_library_attention = True  # Transformers' own functions, where nothing is composed

    def __init__(self, config: DCFormerConfig, *inputs: Any, **kwargs: Any):
        register_hub_conversions()
        self._supports_sdpa = self._supports_flash_attn = self._supports_flex_attn = not config.composes
        super().__init__(config, *inputs, **kwargs)

    def _why_no_maps(self) -> str | None:
        """Why there is nothing to return for `output_attentions=True`; None where there is."""
        implementation = self.config._attn_implementation
        if implementation == "eager":
            return None
        named = f"attn_implementation={implementation!r}"
        if implementation == DEFAULT_ATTENTION:
            named = "the default (attn_implementation unset)"
        return f"output_attentions=True needs attention maps, which {named} never holds. {LOAD_EAGER}"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HeadMap):
            module.fill()
        if isinstance(module, HeadEmbeddingAttention):
            for name in EMBEDDING_NAMES:
                init.normal_(getattr(module, name), mean=0.0, std=embedding_init_std(self.config, name))
        if isinstance(module, DCFormerCompose):
            init_compose(module, compose_init_std(self.config))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The attention implementation to use: just the named one, or `DEFAULT_ATTENTION` when none is named.

        The default is decided by each layer, for the tensors that it is given (`default_implementation`):
        "dcformer_triton" on CUDA devices whose self-check has passed, otherwise "dcformer_chunked". To return to it,
        call `model.set_attn_implementation(None)`.

        A language model without composition can also use those of Transformers: "sdpa", "flex_attention" and flash
        attention.

        Raises:
            ValueError: on a name that cannot compose heads, one whose requirements are missing here, or one whose
                limits the model exceeds.
        """
        if requested_attention is None or requested_attention == DEFAULT_ATTENTION:
            return DEFAULT_ATTENTION
        takes_library = self.takes_library_attention and not self.config.composes
        if check_implementation(requested_attention, self.config, type(self).__name__, takes_library):
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        return requested_attention

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Loads a model. Arguments and return value are those of `PreTrainedModel.from_pretrained`, which does it.

        The authors' PyTorch repositories on the Hub load like any other; see `hub_dcformer.load_hub_folder`.

        Raises:
            OSError: when a weight file is damaged, naming it.
        """
        path = pretrained_model_name_or_path
        check_stored_heads(cls, path, kwargs)
        kwargs, is_hub = with_hub_config(cls, path, kwargs)
        if is_hub:
            return load_hub_folder(super().from_pretrained, path, *args, **kwargs)
        with naming_damage(path, kwargs):
            return super().from_pretrained(path, *args, **kwargs)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Splits a new model over devices as Transformers does, before parameters are read, but never through a group.

        Raises:
            ValueError: when the tensor-parallel size does not divide the groups of heads, and on pipeline parallelism.
        """
        if mesh_manager is not None and (stages := getattr(distributed_config, "pp_size", 1)) > 1:
            raise ValueError(
                f"pp_size={stages}: {type(model).__name__} does not run in pipeline stages of Transformers. Use "
                "tp_plan='auto', FSDP, or device_map='auto'."
            )
        if mesh_manager is not None and distributed_config.tp_size > 1 and distributed_config.tp_plan != {}:
            check_tensor_parallel(model.config, distributed_config.tp_size)
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves a model as Transformers does, under this package's names wherever it came from.

        Args:
            save_directory: the folder.
            args, kwargs: those of `PreTrainedModel.save_pretrained`. With `save_original_format=True` the tensors of a
                model that was loaded with hub names get these again (a decoder without head keeps this
                package's); `config.json` is in this package's keys all the same.

        Raises:
            ValueError: for a model that would not run, or would be loaded with layers that it does not have.
        """
        self.config.undecided_fields = None  # this model has decided
        if isinstance(decoder := self.base_model, DCFormerModel):
            layers, _ = decoder.running_layers()  # what cannot run cannot be loaded
            refuse_missing_layers(len(layers), decoder.config.num_hidden_layers)
        was_converted = bool(getattr(self, "_weight_conversions", None))  # a new model has no other original format
        given = inspect.signature(super().save_pretrained).bind(save_directory, *args, **kwargs)
        given.arguments["save_original_format"] = was_converted and given.arguments.get("save_original_format", False)
        super().save_pretrained(*given.args, **given.kwargs)


@auto_docstring(
    custom_intro="""
    DCFormer without a head on top: hidden states of a decoder whose attention heads are composed before and after the
    softmax (arXiv 2405.08553).
    """
)
class DCFormerModel(DCFormerPreTrainedModel):
    layer_class: type[nn.Module] = DCFormerDecoderLayer
    _checked_kinds: tuple[Any, ...] | None = None  # what `running_layers` found right

    def __init__(self, config: DCFormerConfig):
        config.validate_architecture()  # fields may have been set since it was made
        super().__init__(config)
        self.padding_idx = None if config.pad_token_id == -1 else config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = _make_norm(config)
        self.rotary_emb = DCFormerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._no_split_modules = [self.layer_class.__name__]  # a variant's, too
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(  # type: ignore[misc]  # the library's own kwargs name position_ids, too
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        cache (`Cache`, *optional*):
            Keys and values of the tokens before `input_ids`, which must be this model's; updated, and returned. Callers
            may name it `past_key_values`, as Transformers does up to 5.23.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        check_cache_names(kwargs)
        check_packing(kwargs, position_ids, attention_mask, cache)
        check_trace(kwargs.get("compose_trace"), self.layers, self.training)
        if kwargs.get("output_attentions", self.config.output_attentions) and (missing := self._why_no_maps()):
            logger.warning_once(f"{missing} The tuple of attentions is empty.")  # as with Transformers' sdpa
        hidden_states: Any = inputs_embeds if input_ids is None else look_up(self.embed_tokens, input_ids)
        check_input_shapes(hidden_states, attention_mask, position_ids, are_embeds=inputs_embeds is not None)
        layers, kinds = self.running_layers()
        # Masks are made from what was given: restarting position ids mean packed documents only to a call without a
        # cache, and the empty one that is made below hides nothing.
        given_cache, given_positions = cache, position_ids
        runs_layers_twice = runs_twice(layers, self.training)
        if use_cache and cache is None and not runs_layers_twice:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            check_cache(cache, self.config, hidden_states.shape[1], kwargs.get("is_causal"), runs_layers_twice)
            use_growing_layers(cache)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen)[None]
        masks = self._make_masks(kinds, hidden_states, attention_mask, given_cache, given_positions)

        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=masks[kind],
                position_ids=position_ids,
                **{CACHE_NAME: cache},  # the library takes it away by its own name from layers that are computed again
                use_cache=use_cache,
                layer_idx=index,
                sliding_window=self.config.sliding_window if kind == "sliding_attention" else None,
                attn_implementation=self.config._attn_implementation,
                **kwargs,
            )
        outputs: dict[str, Any] = {"last_hidden_state": self.norm(hidden_states), CACHE_NAME: cache}
        return BaseModelOutputWithPast(**outputs)

    def _make_masks(
        self,
        kinds: list[str],
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
    ) -> dict[str, Any]:
        """The mask of each kind of layer, as the attention implementation takes it. Arguments are those of `forward`.

        Raises:
            ValueError: when masks by kind are given and lack one; on a mask that is too short for the cache.
        """
        if not isinstance(attention_mask, dict):
            if attention_mask is not None and attention_mask.ndim == 2:
                if cache is not None:
                    check_mask_length(attention_mask, cache, hidden_states.shape[1])
                attention_mask = attention_mask.expand(hidden_states.shape[0], -1)  # one row may be of all sequences
            make_mask = {
                "full_attention": create_causal_mask,
                "sliding_attention": create_sliding_window_causal_mask,
            }
            given = (self.config, hidden_states, attention_mask, cache, position_ids)
            return {kind: make_mask[kind](*given) for kind in sorted(set(kinds))}
        # `generate` gives masks by kind when it compiles the forward
        if absent := [kind for kind in kinds if kind not in attention_mask]:
            raise ValueError(
                f"attention_mask has masks for {sorted(attention_mask)}, and none for the model's {absent[0]!r} "
                "layers: add it, or None where attention is causal."
            )
        return attention_mask

    def running_layers(self) -> tuple[nn.ModuleList, list[str]]:
        """The layers that run and their kinds, which are those of their positions, whichever layer stands there.

        The fields of the configuration that decide it are checked again when they have changed. Fewer layers run while
        `generate` drafts with `assistant_early_exit`.

        Raises:
            ValueError: naming the fields.
        """
        traced = torch.compiler.is_compiling()  # what is remembered would be a guard of the graph
        if not traced:
            self._check_head_maps()
        fields = vars(self.config)  # attributes of a configuration are slow
        number, window, types = fields["num_hidden_layers"], fields["sliding_window"], fields["layer_types"]
        layers = self.layers[: max(number, 0)]
        if traced or self._checked_kinds != (len(layers), number, window, types):
            if number < 0:
                raise ValueError(f"num_hidden_layers={number} must not be negative.")
            self.config.check_kinds(types and types[: len(layers)])
            if len(types) < len(layers):
                raise ValueError(
                    f"the model has {len(self.layers)} layers and config.num_hidden_layers={number}, but "
                    f"config.layer_types has {len(types)} entries: give every layer its kind there."
                )
            if not traced:
                self._checked_kinds = (len(layers), number, window, list(types))  # lists may change in place
        return layers, types[: len(layers)]

    def _check_head_maps(self) -> None:
        """Refuses layers that read other heads than the configuration says, by which they are saved and loaded."""
        rows = [getattr(self.config, field, None) for field in MAP_FIELDS]
        layers: Any = self.layers
        for index, layer in zip(range(self.config.num_hidden_layers), layers, strict=False):
            own: tuple[HeadMap | None, HeadMap | None] = (layer.self_attn.key_heads, layer.self_attn.value_heads)
            if rows == [None, None] and own == (None, None):
                return  # a model without maps
            for field, of_layers, heads in zip(MAP_FIELDS, rows, own, strict=True):
                has_row = of_layers is None or index < len(of_layers)
                expected = list(self.config.head_map(field, index)) if has_row else None
                if heads is None or list(heads.given) != expected:
                    made = "no map" if heads is None else list(heads.given)
                    raise ValueError(
                        f"layer {index} was made with {made} for {field}, the configuration asks for {expected}: when "
                        f"layers change places, so must the rows of {' and '.join(MAP_FIELDS)}."
                    )


class _LanguageModel:
    """Registers each subclass by its name as a causal language model: by class names `Trainer` decides whether to shift
    smoothed labels. Classes that are made later, such as `fully_shard`'s, are among them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__


@auto_docstring(
    custom_intro="""
    DCFormer for causal language modeling: a decoder whose attention heads are composed before and after the softmax
    (arXiv 2405.08553), with a linear layer on top.
    """
)
class DCFormerForCausalLM(_LanguageModel, DCFormerPreTrainedModel, DCFormerGenerationMixin):
    decoder_class: type[DCFormerModel] = DCFormerModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # annotated too narrowly upstream
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.loss_type = "ForCausalLM"  # the library goes by names of classes, and a subclass may have any

    @takes_cache
    @can_return_tuple
    @auto_docstring
    def forward(  # type: ignore[misc]  # the library's own kwargs name position_ids, too
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        compose_trace: ComposeTrace | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        cache (`Cache`, *optional*):
            Keys and values of the tokens before `input_ids`, which must be this model's; updated, and returned. Callers
            may name it `past_key_values`, as Transformers does up to 5.23.
        compose_trace (`ComposeTrace`, *optional*):
            Collects the attention maps before and after each composition, with `attn_implementation="eager"`. In
            `generate` it is an argument like any other of the model, and of this model alone: not of an assistant.

        Example:

        ```python
        >>> from transformers import AutoTokenizer
        >>> from dcformer import DCFormerForCausalLM

        >>> folder = "checkpoints/dcformer-synthetic"  # or "Caiyun-AI/DCFormer-2.8B"
        >>> tokenizer, model = AutoTokenizer.from_pretrained(folder), DCFormerForCausalLM.from_pretrained(folder)
        >>> prompt = "\n< Peter owns the desk. Olga owns the banana. >. Olga owns a kind of"
        >>> inputs = tokenizer(prompt, return_tensors="pt")
        >>> tokenizer.decode(model(**inputs).logits[0, -1].argmax())
        'fruit'
        ```
        """
        if compose_trace is not None:
            kwargs["compose_trace"] = compose_trace  # type: ignore[typeddict-unknown-key]  # for the attention only
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        # the last few positions (0: all), or those of an index tensor
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])  # [B, T or logits_to_keep, V]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )


class HeadOfDecoder:
    """Mixin for Transformers' generic heads. They find their decoder through `AutoModel`, which in remote code does not
    know our configurations yet: the first head that is made registers them. A decoder that is loaded later is saved
    with its code all the same."""

    accepts_loss_kwargs = False  # the library's losses are means over a batch, whatever `Trainer` says of others

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if type(config) not in MODEL_MAPPING:
            for decoder in self.decoders():
                if decoder.config_class.model_type == config.model_type:
                    AutoModel.register(type(config), decoder, exist_ok=True)
                    if decoder.__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME):
                        decoder.register_for_auto_class("AutoModel")
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of the library's head, behind this class

    def decoders(self) -> tuple[Any, ...]:
        """Those that such a head may have."""
        return DCFormerModel, DCPythiaModel, DHAModel


class DCFormerForSequenceClassification(HeadOfDecoder, GenericForSequenceClassification, DCFormerPreTrainedModel):
    """DCFormer with a classifier of whole sequences."""


class DCFormerForTokenClassification(HeadOfDecoder, GenericForTokenClassification, DCFormerPreTrainedModel):
    """DCFormer with a classifier of tokens."""


class DCFormerForQuestionAnswering(HeadOfDecoder, GenericForQuestionAnswering, DCFormerPreTrainedModel):
    """DCFormer with a span predictor for extractive question answering."""


# DCPythia is DCFormer with other settings. Transformers ties a model class to its configuration class, hence the names.


class DCPythiaModel(DCFormerModel):
    """DCPythia's decoder."""

    config: DCPythiaConfig


class DCPythiaForCausalLM(DCFormerForCausalLM):
    """DCPythia language model."""

    config: DCPythiaConfig


class DCPythiaForSequenceClassification(DCFormerForSequenceClassification):
    """DCPythia with a classifier of whole sequences."""

    config: DCPythiaConfig


class DCPythiaForTokenClassification(DCFormerForTokenClassification):
    """DCPythia with a classifier of tokens."""

    config: DCPythiaConfig


class DCPythiaForQuestionAnswering(DCFormerForQuestionAnswering):
    """DCPythia with a span predictor for extractive question answering."""

    config: DCPythiaConfig


# DHA is a plain Transformer with head maps: Transformers' own attention functions serve it, too.


class _PlainAttention:
    # Defaults of the classes, read by Transformers' model tests. Each model sets its own, by its configuration.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True


class DHAModel(_PlainAttention, DCFormerModel):
    """DHA's decoder."""

    config: DHAConfig


class DHAForCausalLM(_PlainAttention, DCFormerForCausalLM):
    """DHA language model."""

    config: DHAConfig


class DHAForSequenceClassification(_PlainAttention, DCFormerForSequenceClassification):
    """DHA with a classifier of whole sequences."""

    config: DHAConfig


class DHAForTokenClassification(_PlainAttention, DCFormerForTokenClassification):
    """DHA with a classifier of tokens."""

    config: DHAConfig


class DHAForQuestionAnswering(_PlainAttention, DCFormerForQuestionAnswering):
    """DHA with a span predictor for extractive question answering."""

    config: DHAConfig


__all__ = [
    "DCFormerForCausalLM",
    "DCFormerForQuestionAnswering",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCFormerPreTrainedModel",
    "DCPythiaForCausalLM",
    "DCPythiaForQuestionAnswering",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "DHAForCausalLM",
    "DHAForQuestionAnswering",
    "DHAForSequenceClassification",
    "DHAForTokenClassification",
    "DHAModel",
]
