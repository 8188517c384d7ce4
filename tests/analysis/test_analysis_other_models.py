"""Traces and circuits of the package's other models: head maps, head embeddings, head systems, images."""

import copy

import pytest
import torch
import transformers
from helpers import PLAIN, randomize, tiny_config

import dcformer
from dcformer import analysis
from dcformer.analysis.html import head_view
from dcformer.errors import DCFormerError
from dcformer.export import plain_model
from dcformer.head_systems import HeadSystemsViTConfig, HeadSystemsViTForImageClassification

IDS = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(0))
KEYS, VALUES = [[0, 1, 1, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [3, 0, 2, 1]]


def ready(model):
    model = randomize(model).eval()
    model.set_attn_implementation("eager")
    return model


def with_system(name, options=None, **fields):
    shape = {key: value for key, value in tiny_config().to_dict().items() if key not in ("model_type", "architectures")}
    fields = shape | {"num_key_value_heads": 4, "head_system": name, "head_system_options": options} | fields
    return ready(dcformer.HeadSystemsForCausalLM(dcformer.HeadSystemsConfig(**fields)))


SYSTEMS = {
    "collaborative": ({}, {}),
    "overlapped": ({"overlap": 2}, {}),
    "mixture_of_heads": ({"num_shared_heads": 1, "num_routed_heads_per_tok": 2}, {}),
    "output_gate": ({}, {"compose_gate": False}),
    "head_pruning": ({}, PLAIN),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_head_outputs_of_systems_add_up(name):
    options, fields = SYSTEMS[name]
    model = with_system(name, options, **fields)
    run = analysis.trace(model, IDS)
    torch.testing.assert_close(run.logits, model(IDS, use_cache=False).logits, rtol=0, atol=0)
    for layer in run.layers.values():
        torch.testing.assert_close(layer.head_outputs.sum(2), layer.attention_output, rtol=0, atol=1e-6)


def test_routing_is_recorded():
    """Gates are those by which the heads' outputs were multiplied, and follow from the routers' logits."""
    model = with_system("mixture_of_heads", *SYSTEMS["mixture_of_heads"][:1])
    run = analysis.trace(model, IDS, positions=[2, 7])
    layer, whole = run.layer(1), analysis.trace(model, IDS).layer(1)
    assert layer.gates.shape == (2, 2, 4) and layer.router_logits.shape == (2, 2, 3)
    torch.testing.assert_close(layer.gates, whole.gates[:, [2, 7]], rtol=0, atol=0)
    routed = layer.gates[..., 1:]
    assert ((routed > 0).sum(-1) == 2).all()  # of three
    weakest = layer.router_logits.argmin(-1, keepdim=True)
    assert (routed.gather(-1, weakest) == 0).all() and (layer.z[:, :, 1:].norm(dim=-1)[routed == 0] == 0).all()
    value = model.model.layers[1].self_attn.system
    ungated = torch.einsum("bhns,bhsd->bnhd", whole.composed_weights, _values(model, value, IDS))
    torch.testing.assert_close(whole.z, ungated * whole.gates[..., None], rtol=1e-5, atol=1e-5)
    assert analysis.trace(ready(dcformer.DCFormerForCausalLM(tiny_config())), IDS).layer(0).gates is None


def _values(model, system, ids):
    seen = {}
    handle = system.v_proj.register_forward_hook(lambda *call: seen.setdefault("v", call[2]))
    model(ids, use_cache=False)
    handle.remove()
    return seen["v"].unflatten(-1, (4, -1)).transpose(1, 2)  # [B, H, S, D]


def test_images_with_a_head_system():
    config = HeadSystemsViTConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=12, patch_size=4,
        num_labels=3, head_system="mixture_of_heads",
    )  # fmt: skip
    run = analysis.trace(ready(HeadSystemsViTForImageClassification(config)), torch.randn(2, 3, 12, 12))
    assert run.grid == (3, 3) and run.layer(0).gates.shape == (2, 9, 4)


def test_maps_are_recorded_and_circuits_follow_them():
    model = ready(
        dcformer.DCFormerForCausalLM(tiny_config(num_key_value_heads=4, key_head_map=KEYS, value_head_map=VALUES))
    )
    layer = analysis.trace(model, IDS).layer(1)
    assert (layer.key_head_map, layer.value_head_map) == (KEYS[1], VALUES[1])
    found = analysis.circuit_weights(model, 1)
    projected = model.model.layers[1].self_attn.v_proj.weight.detach().double().unflatten(0, (4, -1))
    for head, read in enumerate(VALUES[1]):
        torch.testing.assert_close(found.W_V[head], projected[read].T, rtol=0, atol=0)
    assert (found.W_K[0] == found.W_K).all()


@pytest.mark.parametrize("mode", ["add", "mul"])
def test_circuits_of_head_embeddings_are_those_of_the_plain_model(mode):
    fields = PLAIN | {"num_key_value_heads": 1, "qk_norm": False, "sliding_window": None, "head_embeddings": mode}
    model = ready(dcformer.DCFormerForCausalLM(tiny_config(**fields)))
    plain = plain_model(model).model.layers[0].self_attn
    found = analysis.circuit_weights(model, 0)
    for matrix, linear in ((found.W_Q, plain.q_proj), (found.W_K, plain.k_proj), (found.W_V, plain.v_proj)):
        torch.testing.assert_close(matrix, linear.weight.detach().double().unflatten(0, (4, -1)).mT, rtol=0, atol=1e-6)
    analysis.trace(model, IDS)


@pytest.mark.gpu
def test_models_on_a_gpu():
    """Everything that is computed from a trace is on the CPU, and the same as of a model there."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = ready(dcformer.DCFormerForCausalLM(tiny_config(compose_static=True))).double()
    there = copy.deepcopy(model).cuda()
    here, run = analysis.trace(model, IDS), analysis.trace(there, IDS.cuda())
    found, expected = (analysis.breakdown(one, 1, "pre", 5, 2) for one in (run, here))
    for term in analysis.TERMS:
        torch.testing.assert_close(found.terms[term], expected.terms[term])
    torch.testing.assert_close(*(analysis.compose_map(one, 0, "post", 5, 2) for one in (run, here)))
    for one, other in zip(*map(analysis.composition_summary, (run, here)), strict=True):
        assert one.shares == pytest.approx(other.shares)
    torch.testing.assert_close(*(analysis.map_diversity(one, "weights") for one in (run, here)))
    assert len(head_view(run)) == len(head_view(here))
    torch.testing.assert_close(analysis.attribute_heads(there, IDS.cuda(), 5), analysis.attribute_heads(model, IDS, 5))
    for change in ({"terms": "input"}, {"heads": [(0, 1)]}, {"terms": "static", "heads": [(1, 2)]}):
        with torch.no_grad(), analysis.ablate(model, **change), analysis.ablate(there, **change):
            torch.testing.assert_close(there(IDS.cuda()).logits.cpu(), model(IDS).logits)
    with torch.no_grad(), analysis.patch_heads(there, here, [(0, 1)]):  # a trace of the other device
        torch.testing.assert_close(there(IDS.cuda()).logits.cpu(), model(IDS).logits)


def test_circuits_of_systems():
    """Plain projections have circuits; heads that share channels do not."""
    gated = with_system("output_gate", compose_gate=False)
    weight = gated.model.layers[0].self_attn.system.q_proj.weight.detach().double()
    scale = gated.model.layers[0].self_attn.q_norm.weight.detach().double()
    expected = weight.unflatten(0, (4, -1)).mT * scale
    torch.testing.assert_close(analysis.circuit_weights(gated, 0).W_Q, expected, rtol=0, atol=0)
    for name in ("collaborative", "overlapped"):
        with pytest.raises(
            DCFormerError, match=f"head_system='{name}': its heads share channels, and have no circuits"
        ):
            analysis.circuit_weights(with_system(name, SYSTEMS[name][0]), 0)


def test_gates_are_not_drawn_at_random():
    model = with_system("head_pruning", **PLAIN).train()
    for call in (analysis.trace, analysis.attribute_heads, analysis.attribute_terms):
        with pytest.raises(DCFormerError, match=r"may compute at random: call model.eval\(\) first"):
            call(model, IDS, *[5] * (call is not analysis.trace))


def test_models_without_all_their_heads_are_refused():
    """Those that are left have other numbers."""
    model = with_system("head_pruning", {"kept_heads": [[0, 2], [1, 2, 3]]}, **PLAIN)
    for call in (lambda: analysis.trace(model, IDS), lambda: analysis.attribute_heads(model, IDS, 5)):
        with pytest.raises(DCFormerError, match=r"have been removed \(kept_heads\).*before prune_heads"):
            call()


@pytest.mark.parametrize(("name", "call"), [("o_proj", analysis.trace), ("v_proj", analysis.head_diversity)])
def test_adapters_are_to_be_merged_first(name, call):
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install "dcformer[train]"')
    model = ready(dcformer.DCFormerForCausalLM(tiny_config()))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[name], init_lora_weights=False)).eval()
    with pytest.raises(DCFormerError, match=r"merge_and_unload\(\) first"):
        call(model, IDS if call is analysis.trace else "qk")
    layer = analysis.trace(model.merge_and_unload(), IDS).layer(0)
    torch.testing.assert_close(layer.head_outputs.sum(2), layer.attention_output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "GPTNeoX"])
def test_converted_models_are_not_analyzed(family):
    """Whatever their layers look like: norms are elsewhere, and scaled by 1 + w, or projections are one."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8, intermediate_size=8,
        num_hidden_layers=1, vocab_size=97,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = dcformer.modules.convert_attention(model)
    for call in (
        lambda: analysis.trace(model, IDS),
        lambda: analysis.attribute_heads(model, IDS, 5),
        lambda: analysis.circuit_weights(model, 0),
        lambda: analysis.head_diversity(model, "qk"),
        lambda: analysis.head_similarity(model, 0, "qk"),
        lambda: analysis.circuit_scores(model, 0, 0),
        lambda: analysis.ov_table(model, None, 0, 0, [5]),
        lambda: analysis.ablate(model, [(0, 0)]).__enter__(),
    ):
        with pytest.raises(DCFormerError, match=r"this package's own models, .* and this one was converted"):
            call()
