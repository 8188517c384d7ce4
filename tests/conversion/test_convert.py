"""Conversions between frameworks: equal logits, equal tensors, on the reference checkpoint and on random ones."""

import filecmp

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import AUTHORS_WEIGHTS, FIXTURES, authors_folder, randomize, tiny_config
from jax_reference import Settings, maxtext_forward, pax_forward, random_maxtext_params, random_pax_params
from jax_stores import read_arrays, write_maxtext, write_pax
from transformers import AutoModelForCausalLM

from dcformer import DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.conversion import (
    ConversionError,
    convert_hub_to_safetensors,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    open_checkpoint,
)
from dcformer.formats.maxtext import MaxTextFormat

# The JAX model's own float32 noise is about 2e-5 at four layers and 2e-4 at eight.
TOLERANCE, TOLERANCE_8_LAYERS = 5e-5, 2e-4
QUIET = {"progress": False}


def tokens(vocab=97, length=24):
    return np.random.default_rng(0).integers(0, vocab, (2, length))


def logits_of(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


def assert_same_arrays(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


# --- the reference checkpoint written by the original training code ---------------------------------------------------


A1 = FIXTURES / "A1"


@pytest.fixture(scope="module")
def a1_native(tmp_path_factory):
    output = tmp_path_factory.mktemp("a1") / "native"
    convert_jax_to_safetensors(A1, output, config={"sliding_window": 8}, **QUIET)
    return output


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_reference_to_safetensors(a1_native, implementation):
    model = AutoModelForCausalLM.from_pretrained(a1_native, attn_implementation=implementation).eval()
    assert model.dtype == torch.float32
    ids = torch.from_numpy(np.load(A1 / "tokens.npy"))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    torch.testing.assert_close(out.logits, torch.from_numpy(np.load(A1 / "logits.npy")), atol=TOLERANCE, rtol=0)
    for i, hidden in enumerate(out.hidden_states[1:-1]):  # the last one is normalized
        torch.testing.assert_close(hidden, torch.from_numpy(np.load(A1 / f"hidden_{i}.npy")), atol=1e-4, rtol=0)


@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("with_train_state", [False, True])
def test_reference_back_to_orbax(a1_native, tmp_path, ocdbt, with_train_state):
    ocp = pytest.importorskip("orbax.checkpoint", reason="writing Orbax checkpoints needs pip install 'dcformer[jax]'")
    convert_safetensors_to_jax(
        a1_native,
        tmp_path / "jax",
        format="maxtext",
        ocdbt=ocdbt,
        with_train_state=with_train_state,
        step=1000,
        **QUIET,
    )
    source = read_arrays(A1 / "checkpoints" / "1000" / "state", "params.")
    state = tmp_path / "jax" / "1000" / "state"
    assert_same_arrays(read_arrays(state, "params.", ocdbt=ocdbt), source)

    restored = ocp.CheckpointManager(tmp_path / "jax").restore(
        1000, args=ocp.args.Composite(state=ocp.args.PyTreeRestore())
    )["state"]
    assert set(restored) == ({"params", "step", "opt_state"} if with_train_state else {"params"})
    assert_same_arrays(_flatten(restored["params"]), source)
    if with_train_state:
        assert restored["step"] == 1000 and restored["opt_state"]["count"] == 0
        for moment in ("mu", "nu"):
            zeros = _flatten(restored["opt_state"][moment])
            assert {name: array.shape for name, array in zeros.items()} == {n: a.shape for n, a in source.items()}
            assert not any(array.any() for array in zeros.values())

    convert_jax_to_safetensors(tmp_path / "jax", tmp_path / "again", **QUIET)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert filecmp.cmp(a1_native / name, tmp_path / "again" / name, shallow=False), name


def _flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        flat |= _flatten(value, name) if isinstance(value, dict) else {name: np.asarray(value)}
    return flat


def test_reference_reads_the_same_from_every_folder(a1_native):
    root = A1 / "checkpoints"
    for path in (A1, root, root / "1000", root / "1000" / "state", f"file://{root.resolve()}"):
        opened = open_checkpoint(path, config={"sliding_window": 8})
        assert opened.step == 1000
        name = "model.layers.3.self_attn.compose.qkw"
        assert torch.equal(opened.read(name), open_checkpoint(a1_native).read(name))


def test_published_folder_to_safetensors(tmp_path):
    ids, expected = np.load(FIXTURES / "B1" / "tokens.npy"), np.load(FIXTURES / "B1" / "prefill_logits.npy")
    for kind in AUTHORS_WEIGHTS:
        folder = authors_folder(tmp_path / kind.split(".")[0], kind)
        convert_hub_to_safetensors(folder, tmp_path / f"{folder.name}-native", **QUIET)
        np.testing.assert_allclose(logits_of(tmp_path / f"{folder.name}-native", ids), expected, atol=TOLERANCE, rtol=0)
    names = [tmp_path / f"{stem}-native" / "model.safetensors" for stem in ("pytorch_model", "model")]
    assert filecmp.cmp(*names, shallow=False)


# --- JAX -> PyTorch ---------------------------------------------------------------------------------------------------

MAXTEXT = {
    "default": ({}, {}),
    "LGLL, six heads": (
        {"L": 8, "P": 4, "H": 6, "Hkv": 3},
        {"windows": (5, None, 5, 5), "config": {"layer_pattern": "LGLL"}},
    ),
    "static": ({"static": True}, {}),
    "no qk-norm": ({"qk_norm": False}, {}),
    "groups and rank 3": ({"H": 6, "G": 3, "R": 3}, {}),
    "no low rank": ({"low_rank": False}, {}),
    "no gate": ({"gate": False}, {}),
    "talking heads": ({"low_rank": False, "gate": False, "static": True}, {}),
    "plain": ({"low_rank": False, "gate": False}, {}),
    "query-wise": ({}, {"compose_key": False}),
    "key-wise, post": ({"static": False}, {"compose_query": False, "compose_pre": False}),
    "pre": ({}, {"compose_post": False}),
    "tied": ({"tied": True}, {"config": {"tie_word_embeddings": True}}),
    "float32 qkw": ({"compose_dtype": np.float32, "static": True}, {}),
    "one global pattern": ({"L": 3, "P": 1}, {"windows": (None,), "config": {}}),
}
SWITCHES = ("compose_pre", "compose_post", "compose_query", "compose_key")


@pytest.mark.slow
@pytest.mark.parametrize("case", MAXTEXT)
def test_maxtext_to_pytorch(case, tmp_path):
    sizes, how = MAXTEXT[case]
    params = random_maxtext_params(seed=3, **sizes)
    switches = {name: how[name] for name in SWITCHES if name in how}
    settings = Settings(windows=how.get("windows", (5, None)), **switches)
    write_maxtext(tmp_path / "0" / "state", params, train_state=True)
    config = how.get("config", {}) | {"sliding_window": 5} | switches
    convert_jax_to_safetensors(tmp_path, tmp_path / "native", config=config, **QUIET)
    ids = tokens()
    expected = maxtext_forward(params, ids, settings)
    assert expected.std() > 0.5
    tolerance = TOLERANCE_8_LAYERS if sizes.get("L") == 8 else TOLERANCE
    np.testing.assert_allclose(logits_of(tmp_path / "native", ids), expected, atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("prefix", ["params.", "params.params.", "state.params.", ""])
def test_maxtext_variants(prefix, ocdbt, driver, tmp_path):
    """OCDBT or not, parameters only or a train state, nested prefixes: the same tensors."""
    params = random_maxtext_params(seed=4)
    write_maxtext(tmp_path / "plain", params)
    write_maxtext(tmp_path / "it", params, train_state=True, ocdbt=ocdbt, prefix=prefix, driver=driver)
    expected, found = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "it")
    assert expected.shapes == found.shapes
    for name, tensor in expected.tensors():
        assert torch.equal(tensor, found.read(name)), name


@pytest.mark.parametrize("P", [1, 2])
def test_maxtext_without_scanned_layers(P, tmp_path):
    """`scan_layers=False`: a block's tensors are named by its number and have no dimension of layers."""
    params = random_maxtext_params(seed=5, L=4, P=P, static=True)
    unstacked = {}
    for name, array in params.items():
        if not name.startswith("decoder.layers."):
            unstacked[name] = array
            continue
        for block in range(4 // P):
            short = name.removeprefix("decoder.layers.")
            unstacked[f"decoder.layers_{block}.{short}"] = np.take(array, block, axis=1)
    write_maxtext(tmp_path / "stacked", params)
    write_maxtext(tmp_path / "unstacked", unstacked)
    config = {"layer_pattern": "LG" if P == 2 else "G"}
    expected, found = (open_checkpoint(tmp_path / name, config=config) for name in ("stacked", "unstacked"))
    assert expected.config.to_dict() == found.config.to_dict()
    for name, tensor in expected.tensors():
        assert torch.equal(tensor, found.read(name)), name


DCFORMER = {"layer_norm": False, "biases": False, "mlp": "gated"}
PAX = {
    "DCPythia, padded vocabulary, static": ({"padded_V": 104}, {}),
    "DCPythia without static": ({"static": False, "padded_V": 97}, {}),
    "DCFormer++": (DCFORMER, {}),
    "DCFormer++ without static": (DCFORMER | {"static": False}, {}),
    "multi-gate": (DCFORMER | {"mlp": "multi-gate"}, {}),
    "LGLL, six heads": (
        DCFORMER | {"L": 8, "P": 4, "H": 6, "Hkv": 2},
        {"windows": (5, None, 5, 5), "config": {"layer_pattern": "LGLL"}},
    ),
    "no qk-norm": ({"qk_norm": False}, {}),
    "groups": ({"H": 6, "G": 2, "R": 1}, {}),
    "no low rank": ({"low_rank": False}, {}),
    "no gate": ({"gate": False}, {}),
    "query-wise post": ({}, {"compose_key": False, "compose_pre": False}),
    "bfloat16 qkw": ({"compose_dtype": ml_dtypes.bfloat16}, {}),
    "tied": (DCFORMER | {"tied": True}, {"config": {"tie_word_embeddings": True}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PAX)
def test_pax_to_pytorch(case, tmp_path):
    sizes, how = PAX[case]
    params = random_pax_params(seed=6, **sizes)
    pythia = sizes.get("layer_norm", True)
    switches = {name: how[name] for name in SWITCHES if name in how}
    if switches and not switches.get("compose_pre", True):
        params = {name: array for name, array in params.items() if not name.endswith("pre_proj.w")}
    settings = Settings(
        windows=how.get("windows", (5, None)),
        norm_eps=1e-5 if pythia else 1e-6,
        qk_norm_eps=1e-6,
        rotary_fraction=0.25 if pythia else 1.0,
        parallel_residual=pythia,
        **switches,
    )
    write_pax(tmp_path / "checkpoint_00000100" / "state", params)
    config = how.get("config", {}) | {"sliding_window": 5} | switches
    convert_jax_to_safetensors(tmp_path, tmp_path / "native", config=config, **QUIET)
    ids = tokens()
    expected = pax_forward(params, ids, settings)
    assert expected.std() > 0.5
    # from float64, these random models are up to 5.1e-5 in torch and 5.8e-5 in JAX: two float32 results, two tolerances
    tolerance = TOLERANCE_8_LAYERS if sizes.get("L") == 8 else 2 * TOLERANCE
    np.testing.assert_allclose(logits_of(tmp_path / "native", ids), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("prefix", ["mdl_vars.params.lm.", "state.mdl_vars.params.lm.", "params.lm."])
def test_pax_variants(prefix, tmp_path):
    params = random_pax_params(seed=7)
    write_pax(tmp_path / "a" / "checkpoint_00000100", params)
    write_pax(tmp_path / "b" / "checkpoint_00000100" / "state", params, prefix=prefix)
    expected, found = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert found.format == "pax" and found.step == 100
    for name, tensor in expected.tensors():
        assert torch.equal(tensor, found.read(name)), name


def test_steps(tmp_path):
    for step in (5, 20, 100):
        write_maxtext(tmp_path / str(step) / "state", random_maxtext_params(seed=step))
    (tmp_path / "300.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "200" / "state").mkdir(parents=True)  # begun, nothing in it
    assert open_checkpoint(tmp_path).step == 100
    assert any("5, 20, 100" in note for note in open_checkpoint(tmp_path).notes)
    twenty = open_checkpoint(tmp_path, step=20)
    expected = random_maxtext_params(seed=20)["token_embedder.embedding"]
    np.testing.assert_array_equal(twenty.read("model.embed_tokens.weight").numpy(), expected)
    with pytest.raises(ConversionError, match="no step 6: it has 5, 20, 100"):
        open_checkpoint(tmp_path, step=6)


# --- PyTorch -> JAX ---------------------------------------------------------------------------------------------------

NATIVE = {
    "default": {},
    "LGLL, six heads": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "num_hidden_layers": 8,
        "layer_pattern": "LGLL",
    },
    "static, groups, rank 1": {"compose_static": True, "compose_groups": 2, "compose_rank": 1},
    "query-wise": {"compose_key": False},
    "key-wise post": {"compose_query": False, "compose_pre": False},
    "pre, no gate": {"compose_post": False, "compose_gate": False},
    "no low rank, qk-norm": {"compose_projection": False, "qk_norm": True},
    "talking heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "tied": {"tie_word_embeddings": True},
}


def settings_of(config, period):
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    return Settings(
        windows=tuple(windows[:period]),
        norm_eps=config.norm_eps,
        qk_norm_eps=config.qk_norm_eps,
        rotary_fraction=config.rope_parameters.get("partial_rotary_factor", 1.0),
        compose_gelu="tanh" if config.compose_act == "gelu_pytorch_tanh" else "erf",
        parallel_residual=config.use_parallel_residual,
        **{name: getattr(config, name) for name in SWITCHES},
    )


@pytest.mark.parametrize("format", ["maxtext", "pax"])
@pytest.mark.parametrize("case", NATIVE)
def test_pytorch_to_jax(case, format, tmp_path):
    config = tiny_config(norm_eps=1e-5, compose_act="gelu_pytorch_tanh", **NATIVE[case])
    _assert_same_in_jax(DCFormerForCausalLM(config), format, tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"compose_static": True, "compose_act": "gelu_pytorch_tanh"},
        {"mlp_type": "gated", "hidden_act": "silu", "mlp_bias": False, "mlp_gates": 4},
    ],
)
def test_dcpythia_to_pax(overrides, tmp_path):
    config = DCPythiaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=16,
        sliding_window=5,
        qk_norm=True,
        **overrides,
    )
    _assert_same_in_jax(DCPythiaForCausalLM(config), "pax", tmp_path, padded_vocab_size=104)


def _assert_same_in_jax(model, format, tmp_path, **options):
    model = randomize(model)
    model.save_pretrained(tmp_path / "native")
    convert_safetensors_to_jax(tmp_path / "native", tmp_path / "jax", format=format, **options, **QUIET)
    period = 4 if model.config.num_hidden_layers == 8 else 2
    if format == "maxtext":
        params, forward = read_arrays(tmp_path / "jax" / "0" / "state", "params."), maxtext_forward
    else:
        folder = tmp_path / "jax" / "checkpoint_00000000" / "state"
        params, forward = read_arrays(folder, "mdl_vars.params.lm."), pax_forward
    ids = tokens(model.config.vocab_size)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    assert expected.std() > 0.2
    found = forward(params, ids, settings_of(model.config, period))
    tolerance = TOLERANCE_8_LAYERS if period == 4 else TOLERANCE
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("hidden_act", "told"),
    [
        ("gelu", ["activation of the MLP 'gelu_pytorch_tanh', not 'gelu'"]),
        ("gelu_pytorch_tanh", []),
        ("gelu_new", []),
        ("silu", []),
        ("swish", []),
        ("mish", ["activation of the MLP 'one of its own', not 'mish'"]),
    ],
)
def test_activations_that_maxtext_computes_otherwise(hidden_act, told):
    assert MaxTextFormat().computes_otherwise(tiny_config(hidden_act=hidden_act)) == told
