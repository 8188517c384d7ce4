"""The JAX reference, held against the original JAX code's own numbers and against loops written from the formulas."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import FIXTURES

from jax_reference import Settings, maxtext_forward, pax_forward, random_maxtext_params, random_pax_params

V = 97
PAX_SUB_LAYER = "transformer.repeat.sub.x_layers_0."
DCPYTHIA = {"rotary_fraction": 0.25, "parallel_residual": True}
TOKENS = np.random.default_rng(1).integers(0, V, (2, 8))  # one shape for all: JAX compiles for each shape


# ---- the original code's numbers


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fixture_of_the_original_maxtext_code(dtype):
    tensorstore = pytest.importorskip("tensorstore", reason="reading a MaxText checkpoint needs tensorstore")
    folder = FIXTURES / "A1"
    hyper = json.loads((folder / "meta.json").read_text())["hyperparameters"]

    def read(path):
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
        return tensorstore.open(spec).result().read().result()

    arrays = (folder / "checkpoints" / "1000" / "state").glob("params.*")
    params = {path.name.removeprefix("params."): read(path) for path in arrays}
    eps = hyper["normalization_layer_epsilon"]
    settings = Settings(windows=tuple(hyper["window_size"]), norm_eps=eps, qk_norm_eps=eps)
    tokens = np.load(folder / "tokens.npy")
    logits, hidden = maxtext_forward(params, tokens, settings, return_hidden=True, dtype=dtype)
    assert logits.dtype == dtype
    np.testing.assert_allclose(logits, np.load(folder / "logits.npy"), rtol=0, atol=5e-5)
    assert len(hidden) == hyper["num_decoder_layers"]
    for layer, states in enumerate(hidden):
        np.testing.assert_allclose(states, np.load(folder / f"hidden_{layer}.npy"), rtol=0, atol=1e-4)


# ---- one layer, written again as loops over heads, queries and keys in float64


def norm_by_hand(x, scale, bias=None, eps=1e-5):
    if bias is None:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def erf_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def rotate_by_hand(vector, position, fraction):
    """Pairs (i, i + half) of the leading part are complex numbers, turned by position · theta^(-2i/n)."""
    n = int(len(vector) * fraction)
    pairs = (vector[: n // 2] + 1j * vector[n // 2 : n]) * np.exp(1j * position * 10000.0 ** (-np.arange(0, n, 2) / n))
    return np.concatenate([pairs.real, pairs.imag, vector[n:]])


def generators_by_hand(x, w, settings):
    """x [T, E] -> for each of the four generators, lists over groups of w1, w2 [T, R, M] and gates [T, M]."""
    made = []
    for c in range(4):
        low_rank, gates = [], []
        if "dw1" in w:
            for g in range(w["dw1"].shape[1]):
                gelu = {"tanh": tanh_gelu, "erf": erf_gelu}[settings.compose_gelu]
                both = np.tensordot(gelu(x @ w["dw1"][:, g, c]), w["qkw"][g, c], axes=1)  # [T, 2R, M]
                rank = both.shape[1] // 2
                w1 = both[:, :rank]
                low_rank.append((w1 / np.sqrt((w1**2).mean(-1, keepdims=True) + 1e-6), both[:, rank:]))
        if "dd" in w:
            for g in range(w["dd"].shape[1]):
                m = w["dd"].shape[2] // 4
                gates.append(np.tanh(x @ w["dd"][:, g, c * m : (c + 1) * m]))
        made.append((low_rank, gates))
    return made


def compose_by_hand(a, static, sides):
    """Composes the H numbers `a` of one (t, s) pair; sides: (generator, token) of the query's and the key's side."""
    out = a.copy()
    for g, w in enumerate(static if static is not None else []):
        m = slice(g * len(w), (g + 1) * len(w))
        out[m] += a[m] @ w
    for (low_rank, gates), token in sides:
        for g, (w1, w2) in enumerate(low_rank):
            m = slice(g * w1.shape[-1], (g + 1) * w1.shape[-1])
            for r in range(w1.shape[1]):
                out[m] += (a[m] @ w1[token, r]) * w2[token, r]
        for g, gate in enumerate(gates):
            m = slice(g * gate.shape[-1], (g + 1) * gate.shape[-1])
            out[m] += a[m] * gate[token]
    return out


def attention_by_hand(x, w, window, settings):
    """x [T, E], normalised -> [T, E]; w holds query, key, value [E, heads, D], out [H, D, E] and what else there is."""
    length, (_, heads, head_dim) = len(x), w["query"].shape
    q, k, v = (np.tensordot(x, w[name], axes=1) + w.get(f"{name}_bias", 0) for name in ("query", "key", "value"))
    if "q_norm" in w:
        q = norm_by_hand(q, w["q_norm"], eps=settings.qk_norm_eps)
        k = norm_by_hand(k, w["k_norm"], eps=settings.qk_norm_eps)
    shared_by = heads // k.shape[1]
    generators = generators_by_hand(x, w, settings)
    on = (settings.compose_query, settings.compose_key)
    mixed = np.zeros((length, heads, head_dim))
    for t in range(length):
        keys = range(max(0, t - window + 1) if window else 0, t + 1)
        scores = np.zeros((len(keys), heads))
        for i, s in enumerate(keys):
            for h in range(heads):
                rotated = (rotate_by_hand(y, p, settings.rotary_fraction)
                           for y, p in ((q[t, h], t), (k[s, h // shared_by], s)))  # fmt: skip
                scores[i, h] = np.dot(*rotated) / math.sqrt(head_dim)
            if settings.compose_pre:
                sides = [side for side, used in zip(((generators[0], t), (generators[1], s)), on, strict=True) if used]
                scores[i] = compose_by_hand(scores[i], w.get("pre_static"), sides)
        probabilities = np.exp(scores) / np.exp(scores).sum(0)
        for i, s in enumerate(keys):
            p = probabilities[i]
            if settings.compose_post:
                sides = [side for side, used in zip(((generators[2], t), (generators[3], s)), on, strict=True) if used]
                p = compose_by_hand(p, w.get("post_static"), sides)
            mixed[t] += p[:, None] * np.repeat(v[s], shared_by, axis=0)
    return np.tensordot(mixed, w["out"], axes=2) + w.get("out_bias", 0)


def maxtext_layer_by_hand(params, tokens, settings):
    """Logits [T, V] of tokens [T]."""
    p = {name: array.astype(np.float64) for name, array in params.items()}
    layer = {name.removeprefix("decoder.layers."): a[:, 0] for name, a in p.items() if "layers" in name}
    w = {name: layer[f"self_attention_0.{name}.kernel"] for name in ("query", "key", "value", "out")}
    optional = {
        "q_norm": "q_norm.scale",
        "k_norm": "k_norm.scale",
        "dw1": "AttentionOp_0.dyn_w_proj.dw1.kernel",
        "qkw": "AttentionOp_0.dyn_w_proj.qkw",
        "dd": "AttentionOp_0.dyn_w_proj.dd.kernel",
        "pre_static": "AttentionOp_0.pre_proj.w",
        "post_static": "AttentionOp_0.post_proj.w",
    }
    w |= {k: layer[f"self_attention_0.{name}"] for k, name in optional.items() if f"self_attention_0.{name}" in layer}
    x = p["token_embedder.embedding"][tokens]
    normed = norm_by_hand(x, layer["pre_self_attention_layer_norm_0.scale"])
    x = x + attention_by_hand(normed, w, settings.windows[0], settings)
    normed = norm_by_hand(x, layer["post_self_attention_layer_norm_0.scale"])
    hidden = silu(normed @ layer["mlp_0.wi_0.kernel"]) * (normed @ layer["mlp_0.wi_1.kernel"])
    x = x + hidden @ layer["mlp_0.wo.kernel"]
    return norm_by_hand(x, p["decoder.decoder_norm.scale"]) @ p["decoder.logits_dense.kernel"]


def dcpythia_layer_by_hand(params, tokens, settings):
    """Logits [T, V] of tokens [T]."""
    p = {name: array.astype(np.float64) for name, array in params.items()}
    layer = {name.removeprefix(PAX_SUB_LAYER): a[0] for name, a in p.items() if name.startswith(PAX_SUB_LAYER)}
    attn = {name.removeprefix("self_attention."): a for name, a in layer.items() if name.startswith("self_attention.")}
    w = {name: attn[f"{name}.w"] for name in ("query", "key", "value")}
    w |= {f"{name}_bias": attn[f"{name}.b"] for name in ("query", "key", "value")}
    w |= {"out": np.moveaxis(attn["post.w"], 0, 2), "out_bias": attn["post.b"]}
    w |= {"q_norm": attn["q_norm.scale"], "k_norm": attn["k_norm.scale"]}
    w |= {name: attn[f"dyn_w_proj.{name}"] for name in ("dw1", "qkw", "dd")}
    w |= {"pre_static": attn["pre_proj.w"], "post_static": attn["post_proj.w"]}
    x = p["embedding_lookup.emb_var"][tokens]
    normed = norm_by_hand(x, 1 + layer["layer_norm.scale"], layer["layer_norm.bias"])
    attended = attention_by_hand(normed, w, settings.windows[0], settings)
    ff = {name.removeprefix("ff_layer."): a for name, a in layer.items() if name.startswith("ff_layer.")}
    normed = norm_by_hand(x, 1 + ff["layer_norm.scale"], ff["layer_norm.bias"])
    hidden = erf_gelu(normed @ ff["ffn_layer1.linear.w"] + ff["ffn_layer1.bias.b"])
    x = x + attended + hidden @ ff["ffn_layer2.linear.w"] + ff["ffn_layer2.bias.b"]
    return norm_by_hand(x, 1 + p["final_ln.scale"], p["final_ln.bias"]) @ p["softmax.logits_ffn.linear.w"]


@pytest.mark.parametrize(
    ("sizes", "switches"),
    [
        ({}, {"compose_pre": False, "compose_post": False}),  # plain multi-head attention
        ({"low_rank": False, "gate": False, "Hkv": 2, "qk_norm": False}, {}),  # no weights to compose with: likewise
        ({"low_rank": False, "gate": False, "static": True}, {}),  # static only
        ({"static": True, "R": 3}, {}),
        ({"static": True, "G": 2, "Hkv": 2}, {"compose_gelu": "erf"}),
        ({"low_rank": False, "G": 2}, {"windows": (3,)}),
        ({"gate": False}, {"compose_pre": False}),
        ({"static": True}, {"compose_post": False}),
        ({}, {"compose_query": False}),
        ({"static": True}, {"compose_key": False}),
    ],
)
def test_maxtext_layer_against_loops(sizes, switches):
    params = random_maxtext_params(2, L=1, P=1, **sizes)
    settings = replace(Settings(windows=(None,)), **switches)
    logits = maxtext_forward(params, TOKENS, settings, dtype=np.float64)
    expected = [maxtext_layer_by_hand(params, row, settings) for row in TOKENS]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10)


def test_dcpythia_layer_against_loops():
    params = random_pax_params(2, L=1, P=1)
    settings = Settings(windows=(4,), qk_norm_eps=1e-2, **DCPYTHIA)
    logits = pax_forward(params, TOKENS, settings, dtype=np.float64)
    expected = [dcpythia_layer_by_hand(params, row, settings) for row in TOKENS]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10)


# ---- properties


@pytest.mark.parametrize("window", [1, 2, 5, None])
@pytest.mark.parametrize(
    ("forward", "make", "options"),
    [(maxtext_forward, random_maxtext_params, {}), (pax_forward, random_pax_params, DCPYTHIA)],
    ids=["maxtext", "pax"],
)
def test_a_token_reaches_exactly_the_queries_whose_window_holds_it(forward, make, options, window):
    params, settings = make(3, L=1, P=1), Settings(windows=(window,), **options)
    changed = 2
    tokens = TOKENS.copy()
    tokens[:, changed] = (tokens[:, changed] + 1) % V
    difference = np.abs(forward(params, TOKENS, settings) - forward(params, tokens, settings)).max(-1)  # [B, T]
    positions = np.arange(TOKENS.shape[1])
    reached = (positions >= changed) & (positions < changed + (window or len(positions)))
    assert difference[:, reached].min() > 1e-3
    assert difference[:, ~reached].max() == 0


def test_the_two_layouts_are_the_same_model():
    """DCFormer++ as MaxText stores it, renamed and turned into Pax's arrays; the pattern is local, global."""
    params = random_maxtext_params(4, Hkv=2, G=2, static=True, compose_dtype=np.float32)
    names = {
        "pre_self_attention_layer_norm_{}.scale": "layer_norm.scale",
        "post_self_attention_layer_norm_{}.scale": "ff_layer.layer_norm.scale",
        "mlp_{}.wi_0.kernel": "ff_layer.ffn_layer1_gate.linear.w",
        "mlp_{}.wi_1.kernel": "ff_layer.ffn_layer1.linear.w",
        "mlp_{}.wo.kernel": "ff_layer.ffn_layer2.linear.w",
        "self_attention_{}.query.kernel": "self_attention.query.w",
        "self_attention_{}.key.kernel": "self_attention.key.w",
        "self_attention_{}.value.kernel": "self_attention.value.w",
        "self_attention_{}.q_norm.scale": "self_attention.q_norm.scale",
        "self_attention_{}.k_norm.scale": "self_attention.k_norm.scale",
        "self_attention_{}.AttentionOp_0.dyn_w_proj.dw1.kernel": "self_attention.dyn_w_proj.dw1",
        "self_attention_{}.AttentionOp_0.dyn_w_proj.qkw": "self_attention.dyn_w_proj.qkw",
        "self_attention_{}.AttentionOp_0.dyn_w_proj.dd.kernel": "self_attention.dyn_w_proj.dd",
        "self_attention_{}.AttentionOp_0.pre_proj.w": "self_attention.pre_proj.w",
        "self_attention_{}.AttentionOp_0.post_proj.w": "self_attention.post_proj.w",
    }
    pax = {
        "embedding_lookup.emb_var": params["token_embedder.embedding"],
        "final_ln.scale": params["decoder.decoder_norm.scale"],
        "softmax.logits_ffn.linear.w": params["decoder.logits_dense.kernel"],
    }
    for s in range(2):
        prefix = f"transformer.repeat.sub.x_layers_{s}."
        for ours, theirs in names.items():
            pax[prefix + theirs] = np.moveaxis(params["decoder.layers." + ours.format(s)], 1, 0)
        out = params[f"decoder.layers.self_attention_{s}.out.kernel"]  # [H, N, D, E]
        pax[prefix + "self_attention.post.w"] = out.transpose(1, 3, 0, 2)
    like_pax = random_pax_params(layer_norm=False, biases=False, mlp="gated", Hkv=2, G=2, D=8)
    assert {name: array.shape for name, array in pax.items()} == {name: a.shape for name, a in like_pax.items()}
    settings = Settings(windows=(3, None))
    np.testing.assert_array_equal(pax_forward(pax, TOKENS, settings), maxtext_forward(params, TOKENS, settings))


def test_padded_rows_of_the_embedding_are_cut():
    params = random_pax_params(5, padded_V=128)
    cut = params | {"embedding_lookup.emb_var": params["embedding_lookup.emb_var"][:V]}
    settings = Settings(windows=(3, None), **DCPYTHIA)
    logits = pax_forward(params, TOKENS, settings)
    assert logits.shape == (*TOKENS.shape, V)
    np.testing.assert_array_equal(logits, pax_forward(cut, TOKENS, settings))
    with pytest.raises(IndexError):
        pax_forward(params, np.full_like(TOKENS, V), settings)


def test_tied_embeddings():
    settings = Settings(windows=(3, None))
    maxtext = random_maxtext_params(6, tied=True)
    untied = maxtext | {"decoder.logits_dense.kernel": maxtext["token_embedder.embedding"].T}
    logits = maxtext_forward(maxtext, TOKENS, settings)
    np.testing.assert_array_equal(logits, maxtext_forward(untied, TOKENS, settings))
    normalised = maxtext_forward(maxtext, TOKENS, replace(settings, normalize_tied_logits=True))
    np.testing.assert_allclose(normalised * 32**0.5, logits, rtol=1e-4, atol=1e-5)
    pax = random_pax_params(6, tied=True)
    untied = pax | {"embedding_lookup.emb_var": pax["softmax.logits_ffn.linear.w"].T}
    np.testing.assert_array_equal(pax_forward(pax, TOKENS, settings), pax_forward(untied, TOKENS, settings))


def test_multi_gate_scales_groups_of_channels():
    """A gate layer of zeros scales every channel by 1/4; one that is sure of its group keeps that group alone."""
    params = random_pax_params(7, L=1, P=1, layer_norm=False, biases=False, mlp="multi-gate", mgate_dim=4)
    settings = Settings(windows=(None,))
    mgate, down = PAX_SUB_LAYER + "ff_layer.mgate_layer.linear.w", PAX_SUB_LAYER + "ff_layer.ffn_layer2.linear.w"
    gated = {name: array for name, array in params.items() if name != mgate}
    quartered = pax_forward(gated | {down: params[down] / 4}, TOKENS, settings)
    uniform = pax_forward(params | {mgate: np.zeros_like(params[mgate])}, TOKENS, settings)
    np.testing.assert_allclose(uniform, quartered, rtol=0, atol=1e-5)

    # Without attention, token 0 has one MLP input everywhere: gate weights along it are a sure choice.
    tokens = np.zeros_like(TOKENS)
    sure = np.zeros_like(params[mgate])
    embedded = params["embedding_lookup.emb_var"][0]
    without_attention = params | {PAX_SUB_LAYER + "self_attention.post.w": np.zeros((1, 32, 4, 16), np.float32)}
    sure[0, :, 2] = 1e4 * embedded / params[PAX_SUB_LAYER + "ff_layer.layer_norm.scale"][0]
    third = params[down].copy()
    third[0, [i for i in range(48) if i // 12 != 2]] = 0
    plain = {name: array for name, array in without_attention.items() if name != mgate} | {down: third}
    chosen = pax_forward(without_attention | {mgate: sure}, tokens, settings)
    np.testing.assert_allclose(chosen, pax_forward(plain, tokens, settings), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("forward", "make", "options"),
    [(maxtext_forward, random_maxtext_params, {}), (pax_forward, random_pax_params, DCPYTHIA)],
    ids=["maxtext", "pax"],
)
def test_random_checkpoints_tell_choices_apart(forward, make, options):
    """Each choice that a converter could get wrong moves the logits far beyond the float32 noise."""
    params = make(8, Hkv=2, static=True)
    settings = Settings(windows=(4, None), **options)
    exact = forward(params, TOKENS, settings, dtype=np.float64)
    assert 1 < exact.std() < 3
    assert np.abs(forward(params, TOKENS, settings) - exact).max() < 1e-4
    wrong = [
        {"windows": (5, None)},
        {"windows": (None, 4)},
        {"compose_pre": False},
        {"compose_post": False},
        {"compose_query": False},
        {"compose_key": False},
        {"compose_gelu": "erf"},
        {"norm_eps": 1e-6},
        {"qk_norm_eps": 1e-6},
        {"rope_theta": 500000.0},
        {"rotary_fraction": 0.5},
        {"parallel_residual": not settings.parallel_residual},
        *([{"mlp_gelu": "tanh"}] if make is random_pax_params else []),
    ]
    for change in wrong:
        moved = np.abs(forward(params, TOKENS, replace(settings, **change), dtype=np.float64) - exact).max()
        assert moved > 1e-3, change


def test_arrays_of_another_model_are_refused():
    params = random_maxtext_params(9)
    extra = params | {"decoder.layers.self_attention_0.query.bias": np.zeros((4, 2, 8))}
    with pytest.raises(ValueError, match=r"self_attention_0\.query\.bias"):
        maxtext_forward(extra, TOKENS, Settings(windows=(3, None)))
    with pytest.raises(ValueError, match="mlp_1"):  # a pattern of two read as a pattern of one
        maxtext_forward(params, TOKENS, Settings(windows=(3,)))
    shorter = params | {"decoder.layers.mlp_1.wo.kernel": params["decoder.layers.mlp_1.wo.kernel"][:, :1]}
    with pytest.raises(ValueError, match=r"mlp_1\.wo\.kernel: 1 blocks"):
        maxtext_forward(shorter, TOKENS, Settings(windows=(3, None)))
