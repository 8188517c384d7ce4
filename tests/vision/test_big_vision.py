"""Checkpoints of the authors' fork of big_vision, with random weights, against its model written down in NumPy."""

import math

import numpy as np
import pytest
import torch

from dcformer.errors import ConversionError
from dcformer.vision import convert_big_vision

E, H, F, LAYERS, PATCH, LABELS, GROUPS, RANK = 24, 4, 20, 2, 4, 7, 1, 2
D, C = E // H, 4


def make_checkpoint(
    dynamic=True, learned=False, cls=False, representation=True, groups=GROUPS, without=()
) -> dict[str, np.ndarray]:
    """Random arrays under the names, and with the shapes, of `models/vit.py`; but for those `without`."""
    rng, m = np.random.default_rng(0), H // groups
    k = 2 * RANK * m
    shapes = {
        "embedding/kernel": (PATCH, PATCH, 3, E),
        "embedding/bias": (E,),
        "Transformer/encoder_norm/scale": (E,),
        "Transformer/encoder_norm/bias": (E,),
        "head/kernel": (E + 1 if representation else E, LABELS),
        "head/bias": (LABELS,),
    }
    if representation:
        shapes |= {"pre_logits/kernel": (E, E + 1), "pre_logits/bias": (E + 1,)}
    if learned:
        shapes["pos_embedding"] = (1, 9, E)
    if cls:
        shapes["cls"] = (1, 1, E)
    for i in range(LAYERS):
        block = f"Transformer/encoderblock_{i}/"
        attention = block + "MultiHeadDotProductAttention_0/"
        for norm in ("LayerNorm_0", "LayerNorm_1"):
            shapes |= {f"{block}{norm}/scale": (E,), f"{block}{norm}/bias": (E,)}
        for name in ("query", "key", "value"):
            shapes |= {f"{attention}{name}_dense/kernel": (E, H, D), f"{attention}{name}_dense/bias": (H, D)}
        shapes |= {attention + "o_dense/kernel": (E, E), attention + "o_dense/bias": (E,)}
        shapes |= {f"{block}MlpBlock_0/Dense_0/kernel": (E, F), f"{block}MlpBlock_0/Dense_0/bias": (F,)}
        shapes |= {f"{block}MlpBlock_0/Dense_1/kernel": (F, E), f"{block}MlpBlock_0/Dense_1/bias": (E,)}
        if dynamic:
            shapes |= {attention + "query_ln/scale": (D,), attention + "key_ln/scale": (D,)}
            shapes |= {
                attention + "dyn_w_proj/dw1/kernel": (E, groups, C, k),
                attention + "dyn_w_proj/qkw": (groups, C, k, 2 * RANK, m),
                attention + "dyn_w_proj/dd/kernel": (E, groups, C * m),
                attention + "pre_proj/w": (groups, m, m),
                attention + "post_proj/w": (groups, m, m),
            }
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(tuple(without))}
    return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, scale, bias=0.0):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias


def compose(maps, static, down_q, up_q, down_k, up_k, gate_q, gate_k):
    """The fork's `CrossHeadProjection`, pair by pair: maps [B, H, T, S] mixed inside groups."""
    groups, m, _ = static.shape
    out = maps.copy()
    batch, _, queries, keys = maps.shape
    for b, g, t, s in np.ndindex(batch, groups, queries, keys):
        heads = slice(g * m, (g + 1) * m)
        a = maps[b, heads, t, s]
        mixed = a @ static[g]
        mixed = mixed + (down_q[b, t, g] @ a) @ up_q[b, t, g] + (down_k[b, s, g] @ a) @ up_k[b, s, g]
        mixed = mixed + a * gate_q[b, t, g] + a * gate_k[b, s, g]
        out[b, heads, t, s] += mixed
    return out


def attend(x, p):
    """The fork's `MultiHeadDotProductAttention`: x [B, T, E], p the layer's arrays."""
    query, key, value = (
        np.einsum("bte,ehd->bhtd", x, p[f"{name}_dense/kernel"]) + p[f"{name}_dense/bias"][:, None]
        for name in ("query", "key", "value")
    )
    if "query_ln/scale" in p:
        query, key = layer_norm(query, p["query_ln/scale"]), layer_norm(key, p["key_ln/scale"])
    if composes := "pre_proj/w" in p:
        batch, length, _ = x.shape
        groups, m, _ = p["pre_proj/w"].shape
        down = up = np.zeros((batch, length, groups, C, RANK, m))
        gates = [np.zeros((batch, length, groups, m))] * C
    if "dyn_w_proj/qkw" in p:
        hidden = gelu(np.einsum("bte,egck->btgck", x, p["dyn_w_proj/dw1/kernel"]))
        both = np.einsum("btgck,gckim->btgcim", hidden, p["dyn_w_proj/qkw"])
        down, up = both[..., :RANK, :], both[..., RANK:, :]  # [B, T, G, C, R, M]
        down = down / np.sqrt((down**2).mean(-1, keepdims=True) + 1e-6)
    if "dyn_w_proj/dd/kernel" in p:
        gates = np.split(np.tanh(np.einsum("bte,egm->btgm", x, p["dyn_w_proj/dd/kernel"])), C, axis=-1)

    def composed(maps, stage, q, k):
        parts = (down[..., q, :, :], up[..., q, :, :], down[..., k, :, :], up[..., k, :, :], gates[q], gates[k])
        return compose(maps, p[f"{stage}_proj/w"], *parts)

    scores = np.einsum("bhtd,bhsd->bhts", query, key) / math.sqrt(D)
    if composes:
        scores = composed(scores, "pre", 0, 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if composes:
        weights = composed(weights, "post", 2, 3)
    output = np.einsum("bhts,bhsd->bthd", weights, value)
    return output.reshape(*x.shape) @ p["o_dense/kernel"] + p["o_dense/bias"]


def positions(rows, columns):
    y, x = np.mgrid[:rows, :columns]
    omega = 1 / 10000 ** (np.arange(E // 4) / (E // 4 - 1))
    y, x = y.reshape(-1, 1) * omega, x.reshape(-1, 1) * omega
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)


def forward(arrays, images):
    """The fork's `_Model`: images [B, rows, columns, 3] -> logits [B, labels], in float64."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    batch, height, width, _ = images.shape
    rows, columns = height // PATCH, width // PATCH
    patches = images.reshape(batch, rows, PATCH, columns, PATCH, 3)
    x = np.einsum("brpcqk,pqke->brce", patches, arrays["embedding/kernel"]) + arrays["embedding/bias"]
    x = x.reshape(batch, rows * columns, E)
    x = x + (arrays["pos_embedding"] if "pos_embedding" in arrays else positions(rows, columns))
    if "cls" in arrays:
        x = np.concatenate([np.tile(arrays["cls"], (batch, 1, 1)), x], axis=1)
    for i in range(LAYERS):
        block = f"Transformer/encoderblock_{i}/"
        inner = block + "MultiHeadDotProductAttention_0/"
        attention = {name.removeprefix(inner): array for name, array in arrays.items() if name.startswith(inner)}
        norms = [[arrays[f"{block}LayerNorm_{n}/{kind}"] for kind in ("scale", "bias")] for n in (0, 1)]
        (w0, b0), (w1, b1) = (
            [arrays[f"{block}MlpBlock_0/Dense_{n}/{kind}"] for kind in ("kernel", "bias")] for n in (0, 1)
        )
        x = x + attend(layer_norm(x, *norms[0]), attention)
        x = x + gelu(layer_norm(x, *norms[1]) @ w0 + b0) @ w1 + b1
    x = layer_norm(x, arrays["Transformer/encoder_norm/scale"], arrays["Transformer/encoder_norm/bias"])
    x = x[:, 0] if "cls" in arrays else x.mean(1)
    if "pre_logits/kernel" in arrays:
        x = np.tanh(x @ arrays["pre_logits/kernel"] + arrays["pre_logits/bias"])
    return x @ arrays["head/kernel"] + arrays["head/bias"]


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"groups": 2},
        {"groups": 2, "without": ("dyn_w_proj/dw1/kernel", "dyn_w_proj/qkw")},
        {"groups": 2, "without": ("dyn_w_proj/dw1/kernel", "dyn_w_proj/qkw", "dyn_w_proj/dd/kernel")},
        {"groups": 2, "without": ("dyn_w_proj/dd/kernel",)},
        {"dynamic": False},
        {"learned": True, "cls": True, "representation": False},
        {"cls": True},
    ],
    ids=str,
)
def test_logits_are_the_forks(kind):
    arrays = make_checkpoint(**kind)
    images = np.random.default_rng(1).normal(size=(2, 12, 12, 3))
    expected = forward(arrays, images)
    model = convert_big_vision(arrays, image_size=12)
    assert not model.training and model.config.num_labels == LABELS
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model.double()(torch.from_numpy(images).permute(0, 3, 1, 2)).logits.numpy()
    # Both in float64, but for the table of positions, which is in float32 here: 2^-25 of values up to 1, and some times
    # that behind layers which amplify it.
    atol = 1e-12 if kind.get("learned") else 64 * 2**-25
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)
    assert expected.std() > 0.1


def test_files_and_prefixes(tmp_path):
    arrays, images = make_checkpoint(), torch.randn(1, 3, 12, 12)
    logits = convert_big_vision(arrays, 12)(images).logits
    for prefix in ("", "params/", "opt/target/"):
        stored = {prefix + name: array for name, array in arrays.items()}
        if prefix:
            stored |= {"opt/state/step": np.int64(3), "chrono/seconds": np.float32(1)}
        np.savez(tmp_path / "checkpoint.npz", **stored)
        assert torch.equal(convert_big_vision(tmp_path / "checkpoint.npz", 12)(images).logits, logits)


def test_names_of_big_vision_itself():
    """A plain ViT: its attention is flax's, with other names, and heads in the output projection."""
    arrays, images = make_checkpoint(dynamic=False), torch.randn(1, 3, 12, 12)
    upstream = {}
    for name, array in arrays.items():
        if name.endswith("o_dense/kernel"):
            array = array.reshape(H, D, E)
        upstream[name.replace("_dense/", "/").replace("_0/o/", "_0/out/")] = array
    assert any(name.endswith("_0/out/kernel") for name in upstream) and not any("_dense" in name for name in upstream)
    assert torch.equal(convert_big_vision(upstream, 12)(images).logits, convert_big_vision(arrays, 12)(images).logits)


def test_configuration_comes_from_the_shapes():
    config = convert_big_vision(make_checkpoint(groups=2), (12, 16)).config
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (E, H, F)
    assert (config.num_hidden_layers, config.patch_size, config.grid) == (LAYERS, PATCH, (3, 4))
    assert (config.compose_groups, config.compose_rank, config.qk_norm) == (2, RANK, "layernorm")
    assert config.representation_size == E + 1 and config.pooling == "mean" and config.compose_static
    plain = convert_big_vision(make_checkpoint(dynamic=False, learned=True)).config
    assert plain.image_size == (12, 12) and not plain.compose_generators and plain.qk_norm is None


@pytest.mark.parametrize(("patch", "size"), [(4, 224), (14, 224), (32, 224), (6, 84)])
def test_size_of_images_that_positions_do_not_tell(patch, size):
    arrays = make_checkpoint()
    arrays["embedding/kernel"] = np.zeros((patch, patch, *arrays["embedding/kernel"].shape[2:]), np.float32)
    assert convert_big_vision(arrays).config.image_size in (size, (size, size))


def broken(**changes) -> dict[str, np.ndarray]:
    arrays = make_checkpoint()
    for name, array in changes.items():
        name = name.replace("__", "/")
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array
    return arrays


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding__kernel": None}, "embedding/kernel is missing"),
        ({"head__bias": None}, r"1 tensors of the model are not in it \(classifier.bias\)"),
        ({"optimizer__momentum": np.zeros(3)}, r"1 are not known \(optimizer/momentum\)"),
        ({"head__bias": np.zeros(3, np.float32)}, r"head/bias is float32 \(3,\): expected floats of shape \(7,\)"),
        ({"head__bias": np.zeros(7, np.int64)}, r"head/bias is int64 \(7,\)"),
        ({"MAPHead_0__probe": np.zeros((1, 1, E))}, "MAPHead_0/probe is of a model with .* attention pooling"),
        ({"pos_embedding": np.zeros((1, 5, E), np.float32)}, r"pos_embedding is float32 .*: expected .* \(1, 9, 24\)"),
        ({"cls": np.zeros((1, 1, E), np.int64)}, r"cls is int64 .*: expected floats"),
        ({"cls": np.full((1, 1, E), np.nan)}, "cls holds 24 values that are NaN or infinite as float32, of 24"),
        ({"head__bias": np.array([0, np.inf, 1e300, 1, 1, 1, 1])}, "head/bias holds 2 values that are NaN or infinite"),
    ],
)
def test_what_is_no_checkpoint_of_it(changes, message):
    with pytest.raises(ConversionError, match=message):
        convert_big_vision(broken(**changes), 12)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: b"not an archive", "it is not a zip archive, or its end is missing"),
        (lambda whole: whole[: len(whole) // 2], "it is not a zip archive, or its end is missing"),
        (lambda whole: whole[:20_000] + bytes(400) + whole[20_400:], "Bad CRC-32"),
        (lambda whole: whole.replace(b"), }", b" , }"), "EOF in multi-line statement"),
    ],
    ids=["text", "cut off", "zeros", "header"],
)
def test_damaged_files(tmp_path, damage, message):
    file = tmp_path / "x.npz"
    np.savez(file, **make_checkpoint())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConversionError, match=rf"x\.npz cannot be read as a \.npz file: .*({message})"):
        convert_big_vision(file, 12)


def test_no_file_of_arrays(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ConversionError, match=r"x\.npy cannot be read as a \.npz file: it is not a zip archive"):
        convert_big_vision(tmp_path / "x.npy")
    with pytest.raises(ConversionError, match="cannot be read"):
        convert_big_vision(tmp_path / "absent.npz")
    with pytest.raises(ConversionError, match="5 positions, not a square number: give image_size"):
        convert_big_vision(broken(pos_embedding=np.zeros((1, 5, E), np.float32)))
