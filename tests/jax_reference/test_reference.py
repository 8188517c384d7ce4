"""The JAX reference, held against the original JAX code's own numbers, and its two layouts against each other.

What the original's checkpoint does not have (static projections, groups, DCPythia's norms and biases) is held against
our PyTorch model in tests/conversion/test_convert.py, and that against loops in tests/test_compose_dcformer.py.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import FIXTURES

from jax_reference import Settings, maxtext_forward, pax_forward, random_maxtext_params, random_pax_params

V = 97
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


# ---- properties


def test_the_two_layouts_are_the_same_model():
    """DCFormer++ as MaxText stores it, renamed and turned into Pax's arrays; the pattern is local, global."""
    params = random_maxtext_params(4, Hkv=2, G=2, static=True, compose_dtype=np.float32)
    names = {
        "pre_self_attention_layer_norm_{}.scale": "layer_norm.scale",
        "post_self_attention_layer_norm_{}.scale": "ff_layer.layer_norm.scale",
        "mlp_{}.wi_0.kernel": "ff_layer.ffn_layer1_gate.linear.w",
        "mlp_{}.wi_1.kernel": "ff_layer.ffn_layer1.linear.w",
        "mlp_{}.wo.kernel": "ff_layer.ffn_layer2.linear.w",
    }
    for maxtext, pax in (
        *((f"{name}.kernel", f"{name}.w") for name in ("query", "key", "value")),
        *((f"{side}_norm.scale", f"{side}_norm.scale") for side in "qk"),
        *(
            (f"AttentionOp_0.dyn_w_proj.{name}", f"dyn_w_proj.{name.removesuffix('.kernel')}")
            for name in ("dw1.kernel", "qkw", "dd.kernel")
        ),
        *((f"AttentionOp_0.{stage}_proj.w", f"{stage}_proj.w") for stage in ("pre", "post")),
    ):
        names["self_attention_{}." + maxtext] = "self_attention." + pax
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


def test_tied_embeddings():
    settings = Settings(windows=(3, None))
    maxtext = random_maxtext_params(6, tied=True)
    untied = maxtext | {"decoder.logits_dense.kernel": maxtext["token_embedder.embedding"].T}
    logits = maxtext_forward(maxtext, TOKENS, settings)
    np.testing.assert_array_equal(logits, maxtext_forward(untied, TOKENS, settings))
    normalized = maxtext_forward(maxtext, TOKENS, replace(settings, normalize_tied_logits=True))
    np.testing.assert_allclose(normalized * 32**0.5, logits, rtol=1e-4, atol=1e-5)
    pax = random_pax_params(6, tied=True)
    untied = pax | {"embedding_lookup.emb_var": pax["softmax.logits_ffn.linear.w"].T}
    np.testing.assert_array_equal(pax_forward(pax, TOKENS, settings), pax_forward(untied, TOKENS, settings))


@pytest.mark.slow
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
