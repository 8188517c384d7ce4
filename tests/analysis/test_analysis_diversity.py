"""Diversity of weights and maps, on weights and maps made for it."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from analysis_models import CHECKPOINT, random_model
from helpers import PLAIN, authors_folder, randomize, tiny_config
from safetensors.torch import load_file, save_file

from dcformer import (
    DCFormerForCausalLM,
    DCFormerModel,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    DCViTConfig,
    DCViTForImageClassification,
    DCViTModel,
    DHAConfig,
    DHAForCausalLM,
)
from dcformer.analysis import (
    StoredModel,
    circuit_weights,
    head_diversity,
    head_similarity,
    map_diversity,
    trace,
)
from dcformer.analysis.diversity import FORMS
from dcformer.analysis.tracing import AnalysisTrace
from dcformer.errors import DCFormerError
from dcformer.head_systems import HeadSystemsConfig

H, D, E = 4, 4, 32
PLAIN_HEADS = {"num_key_value_heads": H, "head_dim": D, "hidden_size": E, "qk_norm": False, "num_hidden_layers": 1}


@pytest.fixture
def model():
    return random_model(torch.float64, **PLAIN_HEADS)


def attention(model):
    return model.model.layers[0].self_attn


def heads_of(linear):
    """[H, D, E]: rows of a projection by head, a view."""
    return linear.weight.data.unflatten(0, (H, D))


@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_identical_heads_need_the_directions_of_one(model, circuit):
    for linear in (attention(model).q_proj, attention(model).k_proj, attention(model).v_proj):
        heads_of(linear)[:] = heads_of(linear)[:1].clone()
    columns = attention(model).o_proj.weight.data.unflatten(1, (H, D))
    columns[:] = columns[:, :1].clone()
    for form in FORMS:
        found = head_diversity(model, circuit, form)
        assert found.least(1.0).tolist() == [D], form
        assert torch.allclose(found.curves, head_diversity(model, circuit, "head").curves, atol=1e-10)
    assert torch.allclose(head_similarity(model, 0, circuit), torch.ones(H, H, dtype=torch.float64))
    assert torch.allclose(head_similarity(model, 0, circuit, "subspace"), torch.ones(H, H, dtype=torch.float64))


@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_orthogonal_heads_make_a_straight_line(model, circuit):
    with torch.no_grad():
        for name in "qkv":
            basis = torch.linalg.qr(torch.randn(E, E, dtype=torch.float64)).Q
            getattr(attention(model), f"{name}_proj").weight.copy_(basis[: H * D])
        attention(model).o_proj.weight.copy_(torch.linalg.qr(torch.randn(E, E, dtype=torch.float64)).Q[:, : H * D])
    line = (torch.arange(1, E + 1, dtype=torch.float64) / (H * D)).clamp(max=1)
    for form in ("stack", "stack_right", "sum"):
        found = head_diversity(model, circuit, form)
        assert torch.allclose(found.curves[0], line, atol=1e-12), form
        assert found.least(1.0).tolist() == [H * D] and found.k90.tolist() == [math.ceil(0.9 * H * D)]
        assert found.area.item() == pytest.approx(line.mean().item())
        assert found.effective_rank.item() == pytest.approx(H * D)
    assert torch.allclose(head_similarity(model, 0, circuit), torch.eye(H, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(head_similarity(model, 0, circuit, "subspace"), torch.eye(H, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("form", ["stack", "stack_right"])
def test_what_has_no_full_rank(form):
    """Singular values that are zero stay so: with one value head all heads write what one matrix can."""
    torch.manual_seed(0)
    config = tiny_config(hidden_size=256, num_attention_heads=8, num_key_value_heads=1, head_dim=16, **PLAIN)
    model = randomize(DCFormerForCausalLM(config)).double()
    found = head_diversity(model, "ov", form)
    attention = model.model.layers[0].self_attn
    outer = attention.o_proj.weight.unflatten(1, (8, 16)).movedim(1, 0)  # [H, E, D]
    matrices = [attention.v_proj.weight.T @ w.T for w in outer]
    values = torch.linalg.svdvals(torch.cat(matrices, dim=int(form == "stack")))
    share = values / values.sum()
    assert found.effective_rank[0].item() == pytest.approx(torch.special.entr(share).sum().exp().item(), rel=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_what_changes_nothing(model, form):
    """The order of heads, their scale, and a rotation of q and k together."""
    before = head_diversity(model, "qk", form).curves
    similar = head_similarity(model, 0, "qk")
    rotation = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64)).Q
    for linear in (attention(model).q_proj, attention(model).k_proj):
        heads_of(linear)[2] = rotation @ heads_of(linear)[2].clone()
        linear.weight.data.mul_(3.7)
    assert torch.allclose(head_diversity(model, "qk", form).curves, before, atol=1e-12)
    assert torch.allclose(head_similarity(model, 0, "qk"), similar, atol=1e-12)
    order = torch.tensor([2, 0, 3, 1])
    for linear in (attention(model).q_proj, attention(model).k_proj):
        heads_of(linear)[:] = heads_of(linear)[order].clone()
    assert torch.allclose(head_diversity(model, "qk", form).curves, before, atol=1e-12)
    assert torch.allclose(head_similarity(model, 0, "qk"), similar[order][:, order], atol=1e-12)
    heads_of(attention(model).q_proj)[0] *= 5  # one head alone is another matter
    if form != "head":
        assert (head_diversity(model, "qk", form).curves - before).abs().max() > 1e-3


def matrices(weights, circuit, include_static):
    """[H, E, E], one by one, straight from the definition."""
    first, second = (weights.W_Q, weights.W_K.mT) if circuit == "qk" else (weights.W_V, weights.W_O)
    heads = [a @ b for a, b in zip(first, second, strict=True)]
    if not include_static:
        return torch.stack(heads)
    if circuit == "qk":  # theorem 2.1
        return torch.stack([sum(weights.pre[j, m] * heads[j] for j in range(H)) for m in range(H)])
    return torch.stack([sum(weights.post[j, m] * heads[m] for m in range(H)) for j in range(H)])  # theorem 2.2


@pytest.mark.parametrize("include_static", [False, True])
@pytest.mark.parametrize("circuit", ["qk", "ov"])
@pytest.mark.parametrize("form", FORMS)
def test_gram_form_is_the_svd(form, circuit, include_static):
    """With grouped-query attention, QK-norm's scales, groups of composition and a static projection."""
    model = random_model(torch.float64, hidden_size=E, head_dim=D, compose_groups=2, compose_static=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.copy_(torch.rand(D, dtype=torch.float64) + 0.5)
    found = head_diversity(model, circuit, form, include_static)
    for number in range(2):
        each = matrices(circuit_weights(model, number), circuit, include_static)
        whole = {
            "stack": torch.cat(list(each), dim=1)[None],
            "stack_right": torch.cat(list(each), dim=0)[None],
            "sum": each.sum(0)[None],
            "head": each,
        }[form]
        squares = torch.linalg.svdvals(whole).square()
        curve = (squares.cumsum(-1) / squares.sum(-1, keepdim=True)).mean(0)
        assert (found.curves[number] - curve).abs().max() < 1e-10
    assert torch.equal(found.mean, found.curves.mean(0)) and found.area.shape == (2,)
    if include_static:
        assert (found.curves - head_diversity(model, circuit, form).curves).abs().max() > 1e-3


def test_circuit_weights_are_those_of_attention():
    """Scores and outputs of a head follow from its matrices, where nothing is left out."""
    model = random_model(
        torch.float64, compose_static=True, rope_parameters={"rope_type": "default", "rope_theta": 1e60}, qk_norm=False
    )
    ids = torch.randint(97, (1, 6))
    layer = trace(model, ids).layers[1]
    x = model.model.layers[1].input_layernorm(layer.resid_pre).detach()
    weights = circuit_weights(model, 1)
    dim = weights.W_Q.shape[-1]
    scores = torch.einsum("bte,hed,hfd,bsf->bhts", x, weights.W_Q, weights.W_K, x) * dim**-0.5
    # the first pair of channels turns by one radian per token all the same: compare a token with itself
    assert torch.allclose(scores.diagonal(0, 2, 3), layer.scores.diagonal(0, 2, 3), atol=1e-10)
    values = torch.einsum("bse,hed->bhsd", x, weights.W_V)
    z = layer.composed_weights @ values
    assert torch.allclose(z.transpose(1, 2), layer.z, atol=1e-10)
    assert torch.allclose(weights.W_O, layer.W_O) and weights.W_K.shape == weights.W_Q.shape


def test_maps_say_which_heads_are_read():
    """With as many key as value heads, a layer's own maps; consecutive ones are grouped-query attention."""
    from dcformer.analysis.weights import _from_tensors

    model = random_model(torch.float64, num_key_value_heads=2)
    state = dict(model.model.layers[1].self_attn.named_parameters())
    config = SimpleNamespace(num_attention_heads=4, head_dim=model.config.head_dim)
    config.key_head_map, config.value_head_map = [None, [1, 0, 0, 1]], [None, [0, 0, 1, 1]]
    found, grouped = _from_tensors(state.get, config, 1), circuit_weights(model, 1)
    assert torch.equal(found.W_K, grouped.W_K[[2, 0, 0, 2]]) and torch.equal(found.W_V, grouped.W_V)
    assert torch.equal(found.W_Q, grouped.W_Q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float64_inside(model, dtype):
    """The curve is that of the stored numbers, without rounding of ours."""
    low = model.to(dtype)
    found = head_diversity(low, "qk")
    assert found.curves.dtype == torch.float64
    assert torch.equal(found.curves, head_diversity(low.to(torch.float64), "qk").curves)


def test_similarity_is_the_cosine():
    model = random_model(torch.float64, compose_static=True)
    for circuit in ("qk", "ov"):
        each = matrices(circuit_weights(model, 1), circuit, False).flatten(1)
        expected = torch.nn.functional.cosine_similarity(each[:, None], each[None], dim=-1)
        assert torch.allclose(head_similarity(model, 1, circuit), expected, atol=1e-12)
    for name, matrix in (("q", "W_Q"), ("o", "W_O")):
        basis = getattr(circuit_weights(model, 1), matrix)
        basis = basis.mT if name == "o" else basis
        projectors = basis @ torch.linalg.pinv(basis)  # onto the columns, without QR
        expected = torch.einsum("aef,bfe->ab", projectors, projectors) / basis.shape[-1]
        assert torch.allclose(head_similarity(model, 1, name, "subspace"), expected, atol=1e-9)


def test_folders_are_read_layer_by_layer(tmp_path, bundled, monkeypatch):
    """As the model has it, in this package's names and in the authors', one layer's attention at a time."""
    model, _ = bundled
    for circuit in ("qk", "ov"):
        found = head_diversity(CHECKPOINT, circuit)
        assert torch.equal(found.curves, head_diversity(model, circuit).curves)
    read = []
    original = StoredModel._read
    monkeypatch.setattr(StoredModel, "_read", lambda self, name: read.append(name) or original(self, name))
    StoredModel(CHECKPOINT).circuit_weights(2)
    assert read and all(name.startswith("model.layers.2.self_attn.") for name in read)
    folder = authors_folder(tmp_path / "hub", "model.safetensors")
    loaded = DCFormerForCausalLM.from_pretrained(folder)
    for circuit in ("qk", "ov"):
        expected = head_diversity(loaded, circuit).curves
        assert torch.equal(head_diversity(folder, circuit).curves, expected)
        assert torch.equal(head_similarity(folder, -1, circuit), head_similarity(loaded, -1, circuit))
    with pytest.raises(DCFormerError, match="dcformer-convert hub-to-safetensors first"):
        head_diversity(folder, "qk", include_static=True)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(DCFormerError, match=r"there is no config.json"):
        head_diversity(tmp_path, "qk")
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    with pytest.raises(DCFormerError, match="there are no safetensors"):
        head_diversity(str(tmp_path), "qk")
    tensors = load_file(CHECKPOINT / "model.safetensors")
    tensors["model.layers.3.self_attn.v_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DCFormerError, match=r"layer 3: v_proj.weight holds NaN"):
        head_diversity(tmp_path, "ov")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "num_key_value_heads": 4}))
    with pytest.raises(DCFormerError, match="expected 4 heads of 16 rows, as the configuration says"):
        head_diversity(tmp_path, "qk")


def test_folders_of_other_models(tmp_path, recwarn):
    """A decoder alone, DCPythia, DHA and DCViT are read without a warning; folders of other models are refused."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    maps = {"key_head_map": [[0, 0, 1, 1], [0, 0, 0, 0]], "value_head_map": [[0, 1, 0, 1], [0, 1, 2, 3]]}
    images = DCViTConfig(**sizes, image_size=8, patch_size=4)
    models = {
        "decoder": DCFormerModel(random_model().config),
        "pythia": DCPythiaForCausalLM(DCPythiaConfig(vocab_size=97, **sizes)),
        "dha": DHAForCausalLM(DHAConfig(vocab_size=97, **sizes, **maps)),
        "images": DCViTForImageClassification(images),
        "images, no head": DCViTModel(images),
    }
    for name, model in models.items():
        randomize(model).save_pretrained(tmp_path / name)
        for circuit in ("qk", "ov"):
            found = head_diversity(tmp_path / name, circuit)
            assert torch.equal(found.curves, head_diversity(model, circuit).curves), name
        assert type(StoredModel(tmp_path / name).config) is type(model.config)
    assert not recwarn
    HeadSystemsConfig().save_pretrained(tmp_path / "systems")
    with pytest.raises(
        DCFormerError, match="is 'dcformer_heads', and folders are read of dcformer, dcpythia, dha, dcvit only: load"
    ):
        head_diversity(tmp_path / "systems", "qk")


def test_bad_names(model):
    for call, message in (
        (lambda: head_diversity(model, "kq"), "circuit='kq' is unknown"),
        (lambda: head_diversity(model, "qk", "stacked"), "form='stacked' is unknown: expected one of"),
        (lambda: head_similarity(model, 0, "qk", "angle"), "metric='angle' is unknown"),
        (lambda: head_similarity(model, 1, "qk"), "layer 1 is out of range"),
        (lambda: head_similarity(model, 0, "x", "subspace"), "circuit='x' is unknown"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
    with torch.no_grad():
        attention(model).v_proj.weight.zero_()
    with pytest.raises(DCFormerError, match="layer 0: all weights of a ov circuit are zero"):
        head_diversity(model, "ov")


# --- maps -------------------------------------------------------------------------------------------------------------


def with_weights(run: AnalysisTrace, weights: torch.Tensor) -> AnalysisTrace:
    """The trace with other attention weights in its first layer, as its only one."""
    layer = run.layers[0]
    layer.weights = weights
    run.layers = {0: layer}
    return run


@pytest.fixture
def run():
    return trace(random_model(sliding_window=None, **PLAIN_HEADS), torch.randint(97, (2, 6)))


def test_equal_heads_do_not_differ(run):
    equal = run.layers[0].weights[:, :1].expand(-1, H, -1, -1)
    assert map_diversity(with_weights(run, equal), "weights").item() == pytest.approx(0, abs=1e-7)
    assert map_diversity(run, "weights", "cosine").item() == pytest.approx(0, abs=1e-7)


def test_disjoint_heads_differ_by_ln_2(run):
    """Queries 4 and 5 see enough keys for four heads to look elsewhere each; the others are made padding."""
    weights = torch.zeros(2, H, 6, 6)
    for head in range(H):
        weights[:, head, :, head] = 1
    run.real = torch.tensor([[False] * 4 + [True] * 2] * 2)
    for layer in run.layers.values():
        layer.visible = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    run.real[:] = True
    assert map_diversity(with_weights(run, weights), "weights").item() == pytest.approx(math.log(2), abs=1e-12)
    assert map_diversity(run, "weights", "cosine").item() == pytest.approx(1)


def test_divergence_is_its_definition(run):
    found = map_diversity(run, "weights")
    pairs, weights = [], run.layers[0].weights.double()
    for b in range(2):
        for t in range(1, 6):  # the first query sees one key
            for a in range(H):
                for c in range(a):
                    p, q = weights[b, a, t, : t + 1], weights[b, c, t, : t + 1]
                    mean = (p + q) / 2
                    pairs.append(((p * (p / mean).log()).sum() + (q * (q / mean).log()).sum()) / 2)
    assert found.item() == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-9)
    assert 0 < found.item() < math.log(2)


def test_composed_maps_are_no_probabilities(run):
    for which in ("composed_weights", "scores", "composed_scores"):
        with pytest.raises(DCFormerError, match=f"metric='js' compares probabilities, and {which} are none"):
            map_diversity(run, which)
        assert map_diversity(run, which, "cosine").isfinite().all()
    for which, metric in (("pattern", "js"), ("weights", "tv")):
        with pytest.raises(DCFormerError, match="is unknown: expected"):
            map_diversity(run, which, metric)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("which", "metric"), [("weights", "js"), ("composed_weights", "cosine"), ("scores", "cosine")])
def test_padding_does_not_matter(side, which, metric):
    model, ids = random_model(), torch.randint(97, (1, 9))
    padded, mask = torch.zeros(1, 14, dtype=torch.long), torch.zeros(1, 14, dtype=torch.long)
    at = slice(5, 14) if side == "left" else slice(0, 9)
    padded[:, at], mask[:, at] = ids, 1
    alone = map_diversity(trace(model, ids), which, metric)
    inside = map_diversity(trace(model, {"input_ids": padded, "attention_mask": mask}), which, metric)
    assert torch.allclose(alone, inside, atol=1e-5)  # positions differ: float32 rounding of RoPE's angles
