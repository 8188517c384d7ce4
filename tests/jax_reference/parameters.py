"""Random checkpoints of the two JAX layouts: every name, nothing degenerate, composition strong enough to matter.

The sizes are the letters of `model.py`. A block is a repetition of the P sub-layers that differ, so L is a multiple
of P. Scales keep activations, scores and dynamic weights of order one (freshly initialized composition hardly does
anything), and logits at a standard deviation of 1.5. What is normalized before use is small instead, as in a fresh
model, so that a wrong epsilon shows.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

Params = dict[str, np.ndarray]
SMALL = 0.05  # standard deviation of what a norm comes after


def random_maxtext_params(
    seed: int = 0,
    *,
    V: int = 97,
    E: int = 32,
    L: int = 4,
    P: int = 2,
    H: int = 4,
    Hkv: int | None = None,
    D: int = 8,
    F: int = 48,
    G: int = 1,
    R: int = 2,
    qk_norm: bool = True,
    low_rank: bool = True,
    gate: bool = True,
    static: bool = False,
    tied: bool = False,
    compose_dtype: type = ml_dtypes.bfloat16,
) -> Params:
    """A DCFormer++ checkpoint as MaxText stores it.

    Args:
        Hkv: key/value heads, H unless given.
        qk_norm, low_rank, gate, static, tied: whether there are q/k norms, dw1 and qkw, dd, static projections,
            and no head of its own.
        compose_dtype: of qkw and the static projections; everything else is float32.

    Returns:
        Arrays by dotted name without `params.`, the scan axis at axis 1.
    """
    normal = _generator(seed)
    M, K, Hkv, blocks = H // G, 2 * R * (H // G), Hkv or H, L // P
    qk_std = SMALL if qk_norm else 1.0
    params = {
        "token_embedder.embedding": normal(V, E, std=1.5 / E**0.5 if tied else SMALL),
        "decoder.decoder_norm.scale": normal(E, std=0.2, mean=1),
    }
    if not tied:
        params["decoder.logits_dense.kernel"] = normal(E, V, std=1.5 / E**0.5)
    for s in range(P):
        layer = {
            f"pre_self_attention_layer_norm_{s}.scale": normal(E, blocks, std=0.2, mean=1),
            f"post_self_attention_layer_norm_{s}.scale": normal(E, blocks, std=0.2, mean=1),
            f"mlp_{s}.wi_0.kernel": normal(E, blocks, F, std=1 / E**0.5),
            f"mlp_{s}.wi_1.kernel": normal(E, blocks, F, std=1 / E**0.5),
            f"mlp_{s}.wo.kernel": normal(F, blocks, E, std=1 / F**0.5),
            f"self_attention_{s}.query.kernel": normal(E, blocks, H, D, std=qk_std / E**0.5),
            f"self_attention_{s}.key.kernel": normal(E, blocks, Hkv, D, std=qk_std / E**0.5),
            f"self_attention_{s}.value.kernel": normal(E, blocks, Hkv, D, std=1 / E**0.5),
            f"self_attention_{s}.out.kernel": normal(H, blocks, D, E, std=1 / (H * D) ** 0.5),
        }
        if qk_norm:
            layer[f"self_attention_{s}.q_norm.scale"] = normal(D, blocks, std=0.2, mean=1)
            layer[f"self_attention_{s}.k_norm.scale"] = normal(D, blocks, std=0.2, mean=1)
        op = f"self_attention_{s}.AttentionOp_0"
        if low_rank:
            layer[f"{op}.dyn_w_proj.dw1.kernel"] = normal(E, blocks, G, 4, K, std=1 / E**0.5)
            layer[f"{op}.dyn_w_proj.qkw"] = normal(G, blocks, 4, K, 2 * R, M, std=0.4 / K**0.5).astype(compose_dtype)
        if gate:
            layer[f"{op}.dyn_w_proj.dd.kernel"] = normal(E, blocks, G, 4 * M, std=0.4 / E**0.5)
        if static:
            layer[f"{op}.pre_proj.w"] = normal(G, blocks, M, M, std=0.3 / M**0.5).astype(compose_dtype)
            layer[f"{op}.post_proj.w"] = normal(G, blocks, M, M, std=0.3 / M**0.5).astype(compose_dtype)
        params |= {f"decoder.layers.{name}": array for name, array in layer.items()}
    return params


def random_pax_params(
    seed: int = 0,
    *,
    V: int = 97,
    padded_V: int | None = None,
    E: int = 32,
    L: int = 4,
    P: int = 2,
    H: int = 4,
    Hkv: int | None = None,
    D: int = 16,
    F: int = 48,
    G: int = 1,
    R: int = 2,
    layer_norm: bool = True,
    biases: bool = True,
    mlp: str = "plain",
    mgate_dim: int = 4,
    qk_norm: bool = True,
    low_rank: bool = True,
    gate: bool = True,
    static: bool = True,
    tied: bool = False,
    compose_dtype: type = np.float32,
) -> Params:
    """A checkpoint as Pax stores it; by default of DCPythia, `layer_norm=False, biases=False, mlp="gated"`: DCFormer++.

    Args:
        padded_V: rows of the embedding, V unless given.
        Hkv: key/value heads, H unless given.
        layer_norm: LayerNorm with biases, its scales stored minus 1; otherwise RMSNorm.
        biases: of the attention and MLP projections; a gate has none.
        mlp: "plain", "gated" or "multi-gate" (gated, with `mgate_dim` groups of the F channels).
        qk_norm, low_rank, gate, static, tied: as in `random_maxtext_params`.
        compose_dtype: of qkw and the static projections; everything else is float32.

    Returns:
        Arrays by dotted name without `mdl_vars.params.lm.`, the block axis at axis 0.
    """
    normal = _generator(seed)
    M, K, Hkv, blocks = H // G, 2 * R * (H // G), Hkv or H, L // P
    qk_std = SMALL if qk_norm else 1.0

    def norm(name: str, *shape: int) -> Params:
        scale = normal(*shape, std=0.2, mean=0 if layer_norm else 1)
        return {f"{name}.scale": scale} | ({f"{name}.bias": normal(*shape, std=0.2)} if layer_norm else {})

    params = {"softmax.logits_ffn.linear.w": normal(E, V, std=1.5 / E**0.5), **norm("final_ln", E)}
    if not tied:
        params["embedding_lookup.emb_var"] = normal(padded_V or V, E, std=SMALL)
    for s in range(P):
        layer = {
            **norm("layer_norm", blocks, E),
            **norm("ff_layer.layer_norm", blocks, E),
            "ff_layer.ffn_layer1.linear.w": normal(blocks, E, F, std=1 / E**0.5),
            "ff_layer.ffn_layer2.linear.w": normal(blocks, F, E, std=1 / F**0.5),
            "self_attention.query.w": normal(blocks, E, H, D, std=qk_std / E**0.5),
            "self_attention.key.w": normal(blocks, E, Hkv, D, std=qk_std / E**0.5),
            "self_attention.value.w": normal(blocks, E, Hkv, D, std=1 / E**0.5),
            "self_attention.post.w": normal(blocks, E, H, D, std=1 / (H * D) ** 0.5),
        }
        if mlp != "plain":
            layer["ff_layer.ffn_layer1_gate.linear.w"] = normal(blocks, E, F, std=1 / E**0.5)
        if mlp == "multi-gate":
            layer["ff_layer.mgate_layer.linear.w"] = normal(blocks, E, mgate_dim, std=1 / E**0.5)
        if biases:
            layer["ff_layer.ffn_layer1.bias.b"] = normal(blocks, F, std=0.2)
            layer["ff_layer.ffn_layer2.bias.b"] = normal(blocks, E, std=0.2)
            layer["self_attention.query.b"] = normal(blocks, H, D, std=0.2 * qk_std)
            layer["self_attention.key.b"] = normal(blocks, Hkv, D, std=0.2 * qk_std)
            layer["self_attention.value.b"] = normal(blocks, Hkv, D, std=0.2)
            layer["self_attention.post.b"] = normal(blocks, E, std=0.2)
        if qk_norm:
            layer["self_attention.q_norm.scale"] = normal(blocks, D, std=0.2, mean=1)
            layer["self_attention.k_norm.scale"] = normal(blocks, D, std=0.2, mean=1)
        if low_rank:
            layer["self_attention.dyn_w_proj.dw1"] = normal(blocks, E, G, 4, K, std=1 / E**0.5)
            qkw = normal(blocks, G, 4, K, 2 * R, M, std=0.4 / K**0.5)
            layer["self_attention.dyn_w_proj.qkw"] = qkw.astype(compose_dtype)
        if gate:
            layer["self_attention.dyn_w_proj.dd"] = normal(blocks, E, G, 4 * M, std=0.4 / E**0.5)
        if static:
            layer["self_attention.pre_proj.w"] = normal(blocks, G, M, M, std=0.3 / M**0.5).astype(compose_dtype)
            layer["self_attention.post_proj.w"] = normal(blocks, G, M, M, std=0.3 / M**0.5).astype(compose_dtype)
        params |= {f"transformer.repeat.sub.x_layers_{s}.{name}": array for name, array in layer.items()}
    return params


def _generator(seed: int) -> Callable[..., np.ndarray]:
    """A function that draws a normal float32 array of a shape, with a standard deviation and a mean."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        return (mean + std * rng.standard_normal(shape)).astype(np.float32)

    return normal
