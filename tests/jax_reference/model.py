"""DCFormer++ and DCPythia as JAX computes them, from MaxText and Pax checkpoints.

Letters: B batch, T query length, S key length (= T), V vocabulary, E model width, H query heads, N key/value heads,
D head width, F MLP width, G composition groups, M = H/G heads per group, R composition rank, K hidden width of a
weight generator. The layers repeat a pattern of P: layer `block·P + s` is sub-layer s of its block.

`jax.jit` is there for speed only: one compilation per function instead of one per operation.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array  # weights stay NumPy until they are used
COMPOSE_EPS = 1e-6  # of the norm of w1, whatever the other norms use


@dataclass(frozen=True)
class Settings:
    """What the shapes and names of a checkpoint do not tell.

    Attributes:
        windows: one entry per sub-layer of a pattern block: keys a query sees, its own included, or None for all.
        norm_eps, qk_norm_eps: epsilons of the norms before attention, MLP and head, and of the q/k norms.
        rope_theta: base of the rotary frequencies.
        rotary_fraction: leading part of the head width that is rotated.
        compose_pre, compose_post: whether scores are composed before, and probabilities after the softmax.
        compose_query, compose_key: whether the weights made from the query's, and from the key's token are used.
        compose_gelu, mlp_gelu: "tanh" or "erf", inside the weight generators and in a plain (not gated) MLP.
        parallel_residual: attention and MLP both read the layer's input, as in DCPythia.
        normalize_tied_logits: MaxText's `normalize_embedding_logits`: logits via the embedding are divided by sqrt(E).
    """

    windows: tuple[int | None, ...]
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0
    compose_pre: bool = True
    compose_post: bool = True
    compose_query: bool = True
    compose_key: bool = True
    compose_gelu: str = "tanh"
    mlp_gelu: str = "erf"
    parallel_residual: bool = False
    normalize_tied_logits: bool = False


class Norm(NamedTuple):
    """A norm over the last axis: LayerNorm where it has a bias, RMSNorm otherwise. Both [E], or [D] for q and k."""

    weight: Array
    bias: Array | None = None


class Layer(NamedTuple):
    """One layer's weights in one orientation; None where the model has no such part."""

    attention_norm: Norm
    mlp_norm: Norm
    query: Array  # [E, H, D]
    key: Array  # [E, N, D]
    value: Array  # [E, N, D]
    out: Array  # [H, D, E]
    up: Array  # [E, F]
    down: Array  # [F, E]
    gate: Array | None = None  # [E, F]
    mgate: Array | None = None  # [E, number of gates]
    query_bias: Array | None = None  # [H, D]
    key_bias: Array | None = None  # [N, D]
    value_bias: Array | None = None  # [N, D]
    out_bias: Array | None = None  # [E]
    up_bias: Array | None = None  # [F]
    down_bias: Array | None = None  # [E]
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    dw1: Array | None = None  # [E, G, 4, K]
    qkw: Array | None = None  # [G, 4, K, 2R, M]
    dd: Array | None = None  # [E, G, 4·M]
    pre_static: Array | None = None  # [G, M, M], from head (row) to head (column)
    post_static: Array | None = None  # [G, M, M]

    @property
    def groups(self) -> int:
        """G, composition groups."""
        stored = ((self.qkw, 0), (self.dd, 1), (self.pre_static, 0), (self.post_static, 0))
        return next((array.shape[axis] for array, axis in stored if array is not None), 1)


class Model(NamedTuple):
    """A whole checkpoint's weights."""

    embedding: Array  # [V, E]
    layers: list[Layer]
    final_norm: Norm
    head: Array  # [E, V]


# ---- the computation


@jax.jit
def normalize(x: Array, norm: Norm, eps: float) -> Array:
    """LayerNorm or RMSNorm of x [.., E]; returns [.., E]."""
    if norm.bias is None:
        return rms(x, eps) * norm.weight
    x = x - x.mean(-1, keepdims=True)
    return rms(x, eps) * norm.weight + norm.bias


def rms(x: Array, eps: float) -> Array:
    """x [.., N] divided by its root mean square over the last axis."""
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


def gelu(x: Array, flavor: str) -> Array:
    """GELU of x, "tanh" (the approximation) or "erf" (exact)."""
    return jax.nn.gelu(x, approximate={"tanh": True, "erf": False}[flavor])


@functools.partial(jax.jit, static_argnames=("theta", "fraction"))
def rotary(x: Array, theta: float, fraction: float) -> Array:
    """Rotates the leading `fraction` of the head width, first half against second half.

    Args:
        x: [B, T, H, D], the token at index t being at position t.

    Returns:
        [B, T, H, D].
    """
    length, width = x.shape[1], int(x.shape[-1] * fraction)
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None, None] * frequencies  # [T, 1, width/2]
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    first, second, rest = jnp.split(x, [width // 2, width], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@functools.partial(jax.jit, static_argnames="flavor")
def weight_generators(x: Array, layer: Layer, flavor: str) -> dict[tuple[str, str], dict[str, Array]]:
    """The dynamic composition weights of every token.

    Args:
        x: [B, T, E], the normalized hidden states that also feed q, k and v.
        layer: has dw1 and qkw, or no low rank; dd, or no gate.
        flavor: of the GELU.

    Returns:
        For each (stage, side): "w1" and "w2" [B, T, G, R, M] and "gate" [B, T, G, M], what the layer has of them.
    """
    weights = {}
    for c, which in enumerate((("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key"))):
        made = weights[which] = {}
        if layer.dw1 is not None:
            hidden = gelu(jnp.einsum("bte,egk->btgk", x, layer.dw1[:, :, c]), flavor)
            w1, w2 = jnp.split(jnp.einsum("btgk,gkim->btgim", hidden, layer.qkw[:, c]), 2, axis=-2)
            made["w1"], made["w2"] = rms(w1, COMPOSE_EPS), w2
        if layer.dd is not None:
            m = layer.dd.shape[-1] // 4
            made["gate"] = jnp.tanh(jnp.einsum("bte,egm->btgm", x, layer.dd[:, :, c * m : (c + 1) * m]))
    return weights


@functools.partial(jax.jit, static_argnames="groups")
def compose(maps: Array, static: Array | None, query: dict[str, Array], key: dict[str, Array], groups: int) -> Array:
    """Mixes the heads of every (t, s) pair, inside groups; every branch reads the same input.

    Args:
        maps: [B, H, T, S], scores or probabilities.
        static: [G, M, M] or None.
        query: weights of the query tokens, T at axis 1; empty where they are not used.
        key: weights of the key tokens, S at axis 1; likewise.

    Returns:
        [B, H, T, S].
    """
    a = maps.reshape(maps.shape[0], groups, -1, *maps.shape[2:])  # [B, G, M, T, S]
    out = a
    if static is not None:
        out = out + jnp.einsum("bgjts,gjm->bgmts", a, static)
    for side, weights in (("t", query), ("s", key)):
        if "w1" in weights:
            hidden = jnp.einsum(f"bgjts,b{side}grj->bgrts", a, weights["w1"])
            out = out + jnp.einsum(f"bgrts,b{side}grm->bgmts", hidden, weights["w2"])
        if "gate" in weights:
            out = out + jnp.einsum(f"bgmts,b{side}gm->bgmts", a, weights["gate"])
    return out.reshape(maps.shape)


@jax.jit
def windowed_softmax(scores: Array, window: int) -> Array:
    """Softmax of scores [B, H, T, S] over the last `window` keys up to the query's own, zero elsewhere."""
    length = scores.shape[-1]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)  # [T, S], keys back from the query
    seen = (distance >= 0) & (distance < window)
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)


def attention(x: Array, layer: Layer, window: int | None, settings: Settings) -> Array:
    """Dynamically composable multi-head attention.

    Args:
        x: [B, T, E], normalized hidden states.
        window: keys a query sees, its own included; None: all up to its own.

    Returns:
        [B, T, E], after the output projection.
    """
    q = plus(jnp.einsum("bte,ehd->bthd", x, layer.query), layer.query_bias)  # [B, T, H, D]
    k = plus(jnp.einsum("bse,end->bsnd", x, layer.key), layer.key_bias)  # [B, S, N, D]
    v = plus(jnp.einsum("bse,end->bsnd", x, layer.value), layer.value_bias)  # [B, S, N, D]
    if layer.query_norm is not None:
        q = normalize(q, layer.query_norm, settings.qk_norm_eps)
        k = normalize(k, layer.key_norm, settings.qk_norm_eps)
    q = rotary(q, settings.rope_theta, settings.rotary_fraction)
    k = rotary(k, settings.rope_theta, settings.rotary_fraction)
    heads, head_dim = q.shape[2:]
    k, v = (jnp.repeat(y, heads // y.shape[2], axis=2) for y in (k, v))  # query head h reads key/value head h·N//H

    weights = weight_generators(x, layer, settings.compose_gelu)

    def composed(maps: Array, stage: str, static: Array | None) -> Array:
        query = weights[stage, "query"] if settings.compose_query else {}
        key = weights[stage, "key"] if settings.compose_key else {}
        return compose(maps, static, query, key, layer.groups)

    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(head_dim)  # [B, H, T, S]
    if settings.compose_pre:
        scores = composed(scores, "pre", layer.pre_static)
    probabilities = windowed_softmax(scores, x.shape[1] if window is None else window)  # [B, H, T, S]
    if settings.compose_post:
        probabilities = composed(probabilities, "post", layer.post_static)
    mixed = jnp.einsum("bhts,bshd->bthd", probabilities, v)
    return plus(jnp.einsum("bthd,hde->bte", mixed, layer.out), layer.out_bias)


@functools.partial(jax.jit, static_argnames="flavor")
def mlp(x: Array, layer: Layer, flavor: str) -> Array:
    """Plain (GELU of that flavor), gated (SwiGLU) or multi-gate MLP of x [B, T, E]; returns [B, T, E]."""
    up = plus(x @ layer.up, layer.up_bias)  # [B, T, F]
    hidden = gelu(up, flavor) if layer.gate is None else jax.nn.silu(x @ layer.gate) * up
    if layer.mgate is not None:
        gates = jax.nn.softmax(x @ layer.mgate, axis=-1)[..., None]  # [B, T, gates, 1]
        hidden = (hidden.reshape(*gates.shape[:3], -1) * gates).reshape(hidden.shape)
    return plus(hidden @ layer.down, layer.down_bias)


def plus(x: Array, bias: Array | None) -> Array:
    """x + bias, where there is one."""
    return x if bias is None else x + bias


def decoder_layer(x: Array, layer: Layer, window: int | None, settings: Settings) -> Array:
    """One layer, from hidden states [B, T, E] to hidden states [B, T, E]."""
    attended = x + attention(normalize(x, layer.attention_norm, settings.norm_eps), layer, window, settings)
    mlp_input = x if settings.parallel_residual else attended
    return attended + mlp(normalize(mlp_input, layer.mlp_norm, settings.norm_eps), layer, settings.mlp_gelu)


def forward(model: Model, tokens: np.ndarray, settings: Settings) -> tuple[Array, list[Array]]:
    """Logits [B, T, V] of tokens [B, T], and the hidden states [B, T, E] after each layer."""
    x = jnp.asarray(model.embedding[tokens])  # [B, T, E]
    hidden_states = []
    for index, layer in enumerate(model.layers):
        x = decoder_layer(x, layer, settings.windows[index % len(settings.windows)], settings)
        hidden_states.append(x)
    return normalize(x, model.final_norm, settings.norm_eps) @ model.head, hidden_states


# ---- the two checkpoint layouts


@dataclass(frozen=True)
class Reader:
    """Reads a checkpoint's arrays by name, in the dtype to compute in, and remembers which names were read.

    Attributes:
        params: the arrays by name.
        dtype: what they become.
        unread: names not read so far, shared by every reader of a checkpoint.
        prefix: goes before every name.
        scan: (axis, blocks, block) where arrays are stacked over the pattern blocks: take `block` along `axis`.
    """

    params: Mapping[str, np.ndarray]
    dtype: Any
    unread: set[str]
    prefix: str = ""
    scan: tuple[int, int, int] | None = None

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.params

    def __call__(self, name: str) -> Array:
        """The array of that name, or the current block's slice of it."""
        name = self.prefix + name
        array = np.asarray(self.params[name])
        self.unread.discard(name)
        if self.scan is not None:
            axis, blocks, block = self.scan
            if array.shape[axis] != blocks:
                raise ValueError(f"{name}: {array.shape[axis]} blocks at axis {axis}, others have {blocks}")
            array = array.take(block, axis)
        return array.astype(self.dtype)

    def optional(self, name: str) -> Array | None:
        """The same, or None where the checkpoint has no such name."""
        return self(name) if name in self else None

    def rms_norm(self, name: str) -> Norm | None:
        """The RMSNorm of that name, likewise; both layouts store its scale as it is."""
        return Norm(self(f"{name}.scale")) if f"{name}.scale" in self else None


def maxtext_model(read: Reader, settings: Settings) -> Model:
    """A MaxText checkpoint's weights: scan axis 1, RMSNorm, gated MLP, no biases."""
    pattern, blocks = len(settings.windows), read.params["decoder.layers.mlp_0.wo.kernel"].shape[1]
    layers = []
    for index in range(pattern * blocks):
        block, s = divmod(index, pattern)
        take = replace(read, prefix="decoder.layers.", scan=(1, blocks, block))
        attn, op = f"self_attention_{s}", f"self_attention_{s}.AttentionOp_0"
        layers.append(
            Layer(
                attention_norm=Norm(take(f"pre_self_attention_layer_norm_{s}.scale")),
                mlp_norm=Norm(take(f"post_self_attention_layer_norm_{s}.scale")),
                query=take(f"{attn}.query.kernel"),
                key=take(f"{attn}.key.kernel"),
                value=take(f"{attn}.value.kernel"),
                out=take(f"{attn}.out.kernel"),
                query_norm=take.rms_norm(f"{attn}.q_norm"),
                key_norm=take.rms_norm(f"{attn}.k_norm"),
                gate=take(f"mlp_{s}.wi_0.kernel"),
                up=take(f"mlp_{s}.wi_1.kernel"),
                down=take(f"mlp_{s}.wo.kernel"),
                dw1=take.optional(f"{op}.dyn_w_proj.dw1.kernel"),
                qkw=take.optional(f"{op}.dyn_w_proj.qkw"),
                dd=take.optional(f"{op}.dyn_w_proj.dd.kernel"),
                pre_static=take.optional(f"{op}.pre_proj.w"),
                post_static=take.optional(f"{op}.post_proj.w"),
            )
        )
    embedding = read("token_embedder.embedding")
    if "decoder.logits_dense.kernel" in read:
        head = read("decoder.logits_dense.kernel")
    else:  # logits via the embedding
        head = embedding.T / (math.sqrt(embedding.shape[1]) if settings.normalize_tied_logits else 1.0)
    return Model(embedding, layers, Norm(read("decoder.decoder_norm.scale")), head)


def pax_model(read: Reader, settings: Settings) -> Model:
    """A Pax checkpoint's weights: scan axis 0; `final_ln.bias` tells LayerNorm, whose scales are stored minus 1."""
    layer_norm = "final_ln.bias" in read

    def norm(take: Reader, name: str) -> Norm:
        scale = take(f"{name}.scale")
        return Norm(1 + scale, take(f"{name}.bias")) if layer_norm else Norm(scale)

    sub_layer = "transformer.repeat.sub.x_layers_{}."
    pattern, blocks = len(settings.windows), len(read.params[sub_layer.format(0) + "self_attention.query.w"])
    layers = []
    for index in range(pattern * blocks):
        block, s = divmod(index, pattern)
        take = replace(read, prefix=sub_layer.format(s), scan=(0, blocks, block))
        layers.append(
            Layer(
                attention_norm=norm(take, "layer_norm"),
                mlp_norm=norm(take, "ff_layer.layer_norm"),
                query=take("self_attention.query.w"),
                query_bias=take.optional("self_attention.query.b"),
                key=take("self_attention.key.w"),
                key_bias=take.optional("self_attention.key.b"),
                value=take("self_attention.value.w"),
                value_bias=take.optional("self_attention.value.b"),
                out=take("self_attention.post.w").transpose(1, 2, 0),  # stored [E, H, D]
                out_bias=take.optional("self_attention.post.b"),
                query_norm=take.rms_norm("self_attention.q_norm"),
                key_norm=take.rms_norm("self_attention.k_norm"),
                gate=take.optional("ff_layer.ffn_layer1_gate.linear.w"),
                up=take("ff_layer.ffn_layer1.linear.w"),
                up_bias=take.optional("ff_layer.ffn_layer1.bias.b"),
                down=take("ff_layer.ffn_layer2.linear.w"),
                down_bias=take.optional("ff_layer.ffn_layer2.bias.b"),
                mgate=take.optional("ff_layer.mgate_layer.linear.w"),
                dw1=take.optional("self_attention.dyn_w_proj.dw1"),
                qkw=take.optional("self_attention.dyn_w_proj.qkw"),
                dd=take.optional("self_attention.dyn_w_proj.dd"),
                pre_static=take.optional("self_attention.pre_proj.w"),
                post_static=take.optional("self_attention.post_proj.w"),
            )
        )
    head = read("softmax.logits_ffn.linear.w")
    name = "embedding_lookup.emb_var"
    embedding = read(name)[: head.shape[1]] if name in read else head.T
    return Model(embedding, layers, norm(read, "final_ln"), head)


def maxtext_forward(
    params: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    settings: Settings,
    *,
    return_hidden: bool = False,
    dtype: Any = np.float32,
) -> np.ndarray | tuple[np.ndarray, list[np.ndarray]]:
    """The logits of a MaxText checkpoint.

    Args:
        params: arrays by dotted name, without the leading `params.`; names that the model has no use for raise.
        tokens: [B, T], token ids.
        settings: what the arrays do not tell.
        return_hidden: also return the hidden states after each layer, a list of [B, T, E].
        dtype: `np.float32`, or `np.float64` as a yardstick.

    Returns:
        Logits [B, T, V], as a NumPy array of that dtype; with `return_hidden`, (logits, hidden states).
    """
    return _run(maxtext_model, params, tokens, settings, return_hidden, dtype)


def pax_forward(
    params: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    settings: Settings,
    *,
    return_hidden: bool = False,
    dtype: Any = np.float32,
) -> np.ndarray | tuple[np.ndarray, list[np.ndarray]]:
    """The logits of a Pax checkpoint: as `maxtext_forward`, of arrays named without `mdl_vars.params.lm.`."""
    return _run(pax_model, params, tokens, settings, return_hidden, dtype)


def _run(read_model: Any, params: Any, tokens: Any, settings: Settings, return_hidden: bool, dtype: Any) -> Any:
    with _exact_arithmetic(dtype):
        unread = set(params)
        model = read_model(Reader(params, dtype, unread), settings)
        if unread:
            raise ValueError(f"arrays that belong to no part of this model: {sorted(unread)}")
        logits, hidden_states = forward(model, np.asarray(tokens), settings)
        logits, hidden_states = np.asarray(logits), [np.asarray(x) for x in hidden_states]
    return (logits, hidden_states) if return_hidden else logits


@contextlib.contextmanager
def _exact_arithmetic(dtype: Any) -> Iterator[None]:
    """On the CPU, without shortcuts in matrix products; with 64-bit types where `dtype` is float64."""
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # older JAX: the second
    wide = np.dtype(dtype) == np.float64
    with enable_x64(wide), jax.default_matmul_precision("highest"), jax.default_device(jax.devices("cpu")[0]):
        yield
