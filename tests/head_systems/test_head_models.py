"""Models of every head system: caches, implementations, generation, training, saving, conversion, exporting."""

import copy
import re
import subprocess
import sys
import sysconfig
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload
from head_cases import CASES, heads_config, heads_model, tokens
from helpers import PLAIN, REPOSITORY, randomize, tiny_config
from peft import IA3Config, LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call, grad, vmap
from torch.nn.utils import prune
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import dcformer
from dcformer import (
    DCFormerCompose,
    DCFormerForCausalLM,
    DHAForCausalLM,
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
    to_head_system,
)
from dcformer.head_systems import HEAD_SYSTEMS, system_costs
from dcformer.head_systems.attention_head_systems import HeadSystemsAttention
from dcformer.head_systems.stored_system import check_same_system

LOADER = """
import sys
sys.path.append(sys.argv[1])
import importlib.util
assert importlib.util.find_spec("dcformer") is None, "the package can be imported here, so this would show nothing"
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
ids = torch.arange(40)[None]
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        torch.save(model(ids).logits, folder + "/logits.pt")
AutoModel.from_pretrained(sys.argv[3], trust_remote_code=True)  # makes the class of the decoder known, as for DCFormer
AutoModelForSequenceClassification.from_pretrained(sys.argv[3], trust_remote_code=True)
"""


def padded():
    ids, mask = tokens(), torch.ones(2, 21, dtype=torch.long)
    mask[0, :5] = 0
    return ids, mask


@pytest.mark.parametrize("composed", [False, True], ids=["plain", "composed"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_prefill_steps_and_implementations_agree(case, composed):
    """Windowed and global layers, padded, in float64; chunks of several tokens and single ones; static caches."""
    model = heads_model(case, composed)
    ids, mask = padded()
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("dcformer_chunked")
    found = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=21)
    seen = mask.bool()
    assert float((found.logits - expected)[seen].abs().max()) < 1e-12
    cache, parts, positions = None, [], torch.arange(21).expand(2, -1)
    for start, stop in ((0, 9), (9, 12), *((t, t + 1) for t in range(12, 21))):
        out = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    assert float((torch.cat(parts, dim=1) - expected)[seen].abs().max()) < 1e-12
    held = sum(rows.shape[1] * rows.shape[3] for layer in cache.layers for rows in (layer.keys, layer.values))
    assert held == system_costs(model.config).cache_channels
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    generated = model.generate(ids, **options)
    assert torch.equal(generated, model.generate(ids, use_cache=False, **options))
    static = {"cache_implementation": "static", "disable_compile": True}
    for more in (static, {"prefill_chunk_size": 7}, static | {"prefill_chunk_size": 7}):
        assert torch.equal(generated, model.generate(ids, **options, **more))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_bidirectional(case):
    model = heads_model(case)
    model.config.is_causal = False
    ids, mask = padded()
    chunked = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    assert float((model(ids, attention_mask=mask).logits - chunked)[mask.bool()].abs().max()) < 1e-12
    turned = ids.clone()
    turned[:, -1] += 1
    assert float((model(turned, attention_mask=mask).logits - chunked)[1, -6:-1].abs().max()) > 1e-6


@pytest.mark.parametrize("case", CASES)
def test_chunked_gradients_are_eager_ones(case):
    model, ids = heads_model(case, composed=True), tokens(length=40)
    found = []
    for implementation in ("eager", "dcformer_chunked"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert float((gradient - found[1][name]).abs().max()) < 1e-12, name
        if "overlapped" not in case:
            assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("case", CASES)
def test_trainer_steps_and_saving(case, tmp_path):
    model = HeadSystemsForCausalLM(heads_config(case, composed=True, pad_token_id=0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = tokens(8)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not still
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is HeadSystemsForCausalLM and loaded.config.head_system_options == CASES[case][1]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert type(AutoModel.from_pretrained(tmp_path)) is dcformer.HeadSystemsModel
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    outputs = classifier(ids, labels=torch.zeros(8, dtype=torch.long))
    assert outputs.logits.shape == (8, 3) and (outputs.aux_loss is None) == (model(ids).aux_loss is None)


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("collaborative_half", "mixture") else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_compiles_to_one_graph(case):
    model, ids = heads_model(case, dtype=torch.float32), tokens()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    loss = compiled.train()(ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.slow
def test_exported_folders_load_without_the_package(tmp_path):
    cases = ["collaborative_half", "overlapped", "mixture", "gate", "pruning", "talking_heads"]
    models = {case: heads_model(case, composed=True, dtype=torch.float32) for case in cases}
    for case, model in models.items():
        model.save_pretrained(tmp_path / case)
        dcformer.export_remote_code(tmp_path / case)
    folders = [str(tmp_path / case) for case in cases]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOADER, sysconfig.get_paths()["purelib"], "", *folders],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for case, model in models.items():
        with torch.no_grad():
            found = torch.load(tmp_path / case / "logits.pt")
            torch.testing.assert_close(found, model(torch.arange(40)[None]).logits, atol=1e-5, rtol=1e-5)


# --- losses, routing, gates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "coefficient"), [("mixture", 0.01), ("pruning", 0.01)])
def test_aux_loss_is_in_the_loss(case, coefficient):
    model, (ids, mask) = heads_model(case), padded()
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, labels=labels)
    bare = DCFormerForCausalLM.loss_function.fget(model)(logits=out.logits, labels=labels, vocab_size=97)
    assert float(out.loss - bare - coefficient * out.aux_loss) == pytest.approx(0, abs=1e-12)
    other = ids.clone()
    other[0, :5] = 7
    assert float(model(other, attention_mask=mask, labels=labels).aux_loss - out.aux_loss) == pytest.approx(
        0, abs=1e-12
    )
    assert model(ids, return_dict=False)[-1].shape == () and model(ids, labels=ids, return_dict=False)[0].shape == ()


@pytest.mark.parametrize("case", ["mixture", "pruning"])
def test_parts_of_a_batch_add_up_to_its_aux_loss(case):
    """As `Trainer` adds up what processes and accumulated batches give, each with the number of all tokens."""
    model, ids = heads_model(case), torch.randint(1, 97, (4, 9))
    labels = ids.masked_fill(torch.arange(9) < torch.tensor([[1], [4], [7], [2]]), -100)
    number = (labels[:, 1:] != -100).sum()
    whole = model(ids, labels=labels, num_items_in_batch=number)
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=number) for i in range(4)]
    shares = [(row[1:] != -100).sum() / number for row in labels]
    assert float(sum(shares)) == pytest.approx(1)
    bare = sum(part.loss - share * 0.01 * part.aux_loss for part, share in zip(parts, shares, strict=True))
    assert float(bare + 0.01 * whole.aux_loss - whole.loss) == pytest.approx(0, abs=1e-6)  # losses are float32
    assert float(model(ids, labels=labels).loss - whole.loss) == pytest.approx(0, abs=1e-6)


def test_mixing_of_a_converted_model():
    """A copy, but for the mixing where another start is asked for."""
    plain = randomize(DCFormerForCausalLM(tiny_config(**PLAIN))).eval()
    copied, ones = (
        to_head_system(plain, "collaborative", **options).eval() for options in ({}, {"mixing_init": "ones"})
    )
    torch.testing.assert_close(copied(tokens()).logits, plain(tokens()).logits)
    state, other = copied.state_dict(), ones.state_dict()
    differing = {name for name in state if not torch.equal(state[name], other[name])}
    assert differing and all("mixing" in name and (other[name] == 1).all() for name in differing)


def test_plain_systems_have_no_aux_loss():
    out = heads_model("gate")(tokens(), labels=tokens())
    assert out.aux_loss is None and out.router_logits is None and out.head_gates is None


@torch.no_grad()
def test_maps_of_all_heads_and_gates_apart():
    model, ids = heads_model("mixture"), tokens()
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    assert [maps.shape for maps in out.attentions] == [(2, 4, 21, 21)] * 2
    assert [gates.shape for gates in out.head_gates] == [(2, 21, 4)] * 2
    assert all((gates == 0).sum(-1).eq(1).all() for gates in out.head_gates)  # 4 heads, 2 shared, 1 of 2 taken
    assert torch.allclose(out.attentions[1].sum(-1), torch.ones(2, 4, 21, dtype=torch.float64))
    assert out.router_logits is None
    logits = model(ids, output_router_logits=True).router_logits
    assert [rows.shape for rows in logits] == [(2, 21, 2)] * 2


def test_reentrant_checkpointing_is_named():
    model = heads_model("mixture").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(tokens(), labels=tokens())


def test_a_model_on_the_meta_device_trains():
    with torch.device("meta"):
        model, ids = HeadSystemsForCausalLM(heads_config("pruning")).train(), tokens().to("meta")
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("case", ["pruning", "mixture", "gate"])
def test_transforms_leave_nothing_in_the_model(case):
    """Neither gates nor logits of a forward pass under `torch.func`, which cannot be copied."""
    model, ids = heads_model(case), tokens()
    model.set_attn_implementation("eager")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, row):
        return functional_call(model, parameters, (row[None],), {"labels": row[None], "use_cache": False}).loss

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    assert all(gradient.shape[0] == len(ids) for gradient in found.values())
    torch.testing.assert_close(copy.deepcopy(model)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("composed", [False, True], ids=["plain", "composed"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_offloaded_layers_give_the_same(case, composed, place, tmp_path):
    """Offloading's hooks bring in the parameters of modules that are called; of no others."""
    model, ids = heads_model(case, composed), tokens()
    expected = model(ids, labels=ids)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.1"), "cpu")
    if place == "disk":
        model.save_pretrained(tmp_path / "model")
        options = {"device_map": places | {"model.layers.0": "disk"}, "offload_folder": tmp_path / "offload"}
        offloaded = HeadSystemsForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, **options)
    else:
        offloaded = cpu_offload(model, execution_device="cpu")
    for _ in range(2):
        found = offloaded(ids, labels=ids)
        assert float((found.logits - expected.logits).abs().max()) < 1e-12
        assert float(abs(found.loss - expected.loss)) < 1e-12


@pytest.mark.parametrize("targets", [["router"], "all-linear"], ids=str)
@torch.no_grad()
def test_adapters_of_routers_act_and_merge(targets):
    model, ids = heads_model("mixture_paper"), tokens()
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    on = adapted(ids).logits
    with adapted.disable_adapter():
        off = adapted(ids).logits
    assert float((on - off).abs().max()) > 1e-6
    assert float((adapted.merge_and_unload()(ids).logits - on).abs().max()) < 1e-6  # routers compute in float32


@pytest.mark.parametrize("adapters", [LoraConfig, IA3Config])
@pytest.mark.parametrize("case", ["mixture", "mixture_query_norm", "pruning"])
def test_adapters_elsewhere_train(case, adapters):
    """The losses of what is frozen need no gradient."""
    adapted = get_peft_model(heads_model(case), adapters(task_type="CAUSAL_LM")).train()
    adapted(tokens(), labels=tokens()).loss.backward()
    grads = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert grads and all(grad is not None and bool(grad.isfinite().all()) for grad in grads)


# --- conversion -------------------------------------------------------------------------------------------------------

KEYS = {"compose_post": True, "compose_key": True}
EXACT = {
    "plain": {},
    "talking_heads": {},
    "collaborative": {},
    "overlapped": {"overlap": 0},
    "mixture_of_heads": {"num_shared_heads": 2},
    "output_gate": {},
    "head_pruning": {},
}


@pytest.fixture(scope="module")
def bundled():
    """The bundled checkpoint with composition off."""
    folder = next((REPOSITORY / "checkpoints").iterdir())
    return DCFormerForCausalLM.from_pretrained(folder, **PLAIN, use_cache=True)


@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_the_bundled_checkpoint_generates_the_same(name, bundled):
    model = to_head_system(bundled, name, **EXACT[name])
    ids = torch.randint(4, 288, (2, 30), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids).logits, bundled(ids).logits, atol=1e-4, rtol=1e-4)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), bundled.generate(ids, **options))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("talking_heads", "overlapped")])
@torch.no_grad()
def test_composition_is_kept(name, biased):
    """Grouped keys, biases, partial RoPE, tied embeddings; composed."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = tiny_config(attention_bias=biased, rope_parameters=rope, tie_word_embeddings=biased, qk_norm=biased)
    source = randomize(DCFormerForCausalLM(config)).double()
    model, ids = to_head_system(source, name, **EXACT[name]), tokens()
    assert float((model(ids).logits - source(ids).logits).abs().max()) < 1e-12
    assert model.dtype == torch.float64 and not model.training
    assert float((to_head_system(source.model, name, **EXACT[name])(ids)[0] - source.model(ids)[0]).abs().max()) < 1e-12


def test_a_sequence_classifier_is_converted():
    source = dcformer.DCFormerForSequenceClassification(tiny_config(num_labels=3, pad_token_id=0)).double().eval()
    model = to_head_system(source, "output_gate")
    assert type(model) is dcformer.HeadSystemsForSequenceClassification
    with torch.no_grad():
        assert float((model(tokens()).logits - source(tokens()).logits).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("name", "options", "new"),
    [("output_gate", {}, "system.gate_proj"), ("overlapped", {"overlap": 3}, "o_proj"), ("plain", {}, "nothing")],
)
def test_what_is_frozen_and_how_it_generates_is_kept(name, options, new):
    """Parameters that are new, or of another shape, train."""
    source = DCFormerForCausalLM(tiny_config(**PLAIN, num_key_value_heads=4)).requires_grad_(False)
    source.model.norm.requires_grad_(True)
    source.generation_config.eos_token_id, source.generation_config.repetition_penalty = 5, 1.7
    model = to_head_system(source, name, **options)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"model.norm.weight"} | {name for name, _ in model.named_parameters() if new in name}
    assert model.generation_config.to_dict() == source.generation_config.to_dict()
    assert model.generation_config is not source.generation_config


@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}],
    ids=["default", "proportional"],
)
def test_shared_dims_shift_no_scores(rope):
    """Rotations by model positions: logits do not change when all positions do."""
    model, ids = heads_model("collaborative_half", **rope), tokens(1)
    with torch.no_grad():
        found = [model(ids, position_ids=torch.arange(21)[None] + shift).logits for shift in (0, 1000)]
    # RoPE's angles are computed in float32, so that the shift itself is exact to 1e-4 of an angle only
    assert float((found[0] - found[1]).abs().max()) < 1e-3
    with torch.no_grad():
        moved = model(ids, position_ids=torch.arange(21)[None] * 2).logits
    assert float((found[0] - moved).abs().max()) > 1e-2


@pytest.mark.parametrize("name", [name for name in EXACT if name != "plain"])
def test_a_checkpoint_of_another_system_is_refused(name):
    source = heads_model("gate" if name != "output_gate" else "mixture")
    with pytest.raises(ValueError, match=rf"head_system='{source.config.head_system}'.*'{name}'"):
        to_head_system(source, name)


def test_loading_a_checkpoint_of_another_system_is_refused(tmp_path):
    heads_model("gate").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"head_system='output_gate'.*head_system='mixture_of_heads'"):
        HeadSystemsForCausalLM.from_pretrained(tmp_path, config=heads_config("mixture"))
    for given in ({}, {"config": tiny_config()}):
        with pytest.raises(ValueError, match=r"head_system='output_gate', which DCFormerForCausalLM does not have"):
            DCFormerForCausalLM.from_pretrained(tmp_path, **given)


def test_a_decoder_in_a_wrapper():
    """As FSDP's first version has it: what is read comes from the decoder, what is set stays with the wrapper."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def __getattr__(self, name):
            return getattr(super().__getattr__("module"), name) if name != "module" else super().__getattr__(name)

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model, ids = heads_model("mixture").train(), tokens()
    expected = model(ids, labels=ids, use_cache=False).loss
    model.model = Wrapper(model.model)
    for _ in range(3):
        torch.testing.assert_close(model(ids, labels=ids, use_cache=False).loss, expected)


@pytest.mark.parametrize("case", ["mixture", "gate"])
def test_adapters_load(case, tmp_path):
    """A folder of PEFT has no configuration of a model: the base model's is the one that counts."""
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install "dcformer[train]"')
    heads_model(case, dtype=torch.float32).save_pretrained(tmp_path / "base")
    base = HeadSystemsForCausalLM.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    with torch.no_grad():
        expected = adapted(tokens()).logits
        for model_class in (HeadSystemsForCausalLM, AutoModelForCausalLM):
            loaded = model_class.from_pretrained(tmp_path / "adapter").eval()
            torch.testing.assert_close(loaded(tokens()).logits, expected)


@pytest.mark.parametrize("content", ["", "not JSON", "[]", "{}", None])
def test_what_is_no_configuration_is_the_librarys_to_refuse(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    def refusal(model_class):
        with pytest.raises((OSError, TypeError)) as raised:
            model_class.from_pretrained(tmp_path)
        return type(raised.value), str(raised.value).replace("configuration_dcformer.DCFormer", "").replace(
            "head_systems.configuration_head_systems.HeadSystems", ""
        )

    assert refusal(HeadSystemsForCausalLM) == refusal(DCFormerForCausalLM)


def test_every_argument_of_the_hub_is_used(monkeypatch, tmp_path):
    """The configuration is looked at where the library will look for it."""
    asked = []
    monkeypatch.setattr(HeadSystemsConfig, "get_config_dict", lambda path, **given: asked.append(given) or ({}, {}))
    given = {"revision": "r", "proxies": {"https": "proxy"}, "cache_dir": str(tmp_path), "subfolder": "part"}
    check_same_system(HeadSystemsConfig, "someone/model", given | {"head_system": "plain"})
    assert asked == [given]


def test_other_models_are_refused(bundled):
    with pytest.raises(TypeError, match="model is a Linear"):
        to_head_system(torch.nn.Linear(2, 2), "plain")
    with pytest.raises(ValueError, match="shared_key_query_dim=64: a pretrained layer with RoPE"):
        to_head_system(bundled, "collaborative", shared_key_query_dim=64)
    with pytest.raises(ValueError, match="content_bias=True"):
        biased = DCFormerForCausalLM(tiny_config(attention_bias=True))
        to_head_system(biased, "collaborative", content_bias=True)
    with pytest.raises(ValueError, match=r"\(compose_post by key\): talking heads are static.*compose_key=False"):
        to_head_system(DCFormerForCausalLM(tiny_config(**PLAIN | KEYS)), "talking_heads")
    embedded = tiny_config(**PLAIN, num_key_value_heads=1, head_embeddings="mul")
    with pytest.raises(ValueError, match=r"the model has head_embeddings, .* would be lost"):
        to_head_system(DCFormerForCausalLM(embedded), "head_pruning")


@pytest.mark.parametrize("changed", ["up_proj", "o_proj", "dw1_proj", "parametrization", "torch's pruning", "subclass"])
def test_parameters_that_would_be_lost_are_refused(changed):
    """What is read by name would leave them out, and matrices whose name they take would stay random."""
    model = DCFormerForCausalLM(tiny_config())
    matrix = model.model.layers[0].mlp.up_proj
    if changed == "parametrization":
        torch.nn.utils.parametrizations.weight_norm(matrix)
    elif changed == "torch's pruning":
        prune.l1_unstructured(matrix, "weight", 0.5)
    elif changed == "subclass":
        model.model.layers[0].self_attn.output_gate = torch.nn.Linear(4, 4)
    else:
        get_peft_model(model, LoraConfig(r=2, target_modules=[changed]))
    with pytest.raises(ValueError, match=r"\(DCFormerForCausalLM\) has model\.layers\.0\..*Merge adapters"):
        to_head_system(model, "plain")


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.0.self_attn.compose", "model.layers.0.mlp"])
def test_what_subclasses_do_is_not_lost(path):
    model = DCFormerForCausalLM(tiny_config())
    module = model.get_submodule(path)
    kind = type(module)
    for name in ("Other", kind.__name__):
        module.__class__ = type(name, (kind,), {"__module__": "mine"})
        with pytest.raises(ValueError, match=rf"'{path}' of the model is a mine\.{name}, and not the {kind.__name__} "):
            to_head_system(model, "plain")
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})  # as fully_shard makes them
    to_head_system(model, "plain")


def test_what_replaced_modules_and_models_of_ones_own_do_is_not_lost():
    model = DCFormerForCausalLM(tiny_config())
    first, mlp = model.model.layers[0].mlp, model.model.layers[1].mlp
    mlp.act_fn = torch.nn.ReLU()  # no parameters tell it from the other
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.act_fn' of the model is a torch.*\.ReLU, and not "):
        to_head_system(model, "plain")
    del mlp.act_fn
    mlp.act_fn = torch.relu
    with pytest.raises(
        ValueError, match=r"'model\.layers\.1\.mlp\.act_fn' of the model is not a module, and not the SiLU"
    ):
        to_head_system(model, "plain")
    del mlp.act_fn
    mlp.act_fn = first.act_fn
    to_head_system(model, "plain")
    model.config.hidden_act = "relu"
    with pytest.raises(
        ValueError, match=r"SiLUActivation, and not the ReLU .* configuration that was changed since has"
    ):
        to_head_system(model, "plain")

    class Capped(DCFormerForCausalLM):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits = 30 * torch.tanh(output.logits / 30)
            return output

    with pytest.raises(ValueError, match="Capped has a forward of its own, and not that of DCFormerForCausalLM"):
        to_head_system(Capped(tiny_config()), "plain")
    to_head_system(type("Same", (DCFormerForCausalLM,), {})(tiny_config()), "plain")


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "nonsense"])
def test_attention_of_the_library_is_refused(name):
    with pytest.raises(ValueError, match=rf"'{name}' is not .*: use one of \('eager', [^)]*\), or") as error:
        heads_model("gate").set_attn_implementation(name)
    assert "flex" not in str(error.value)


def test_variants_of_composition_go_with_systems():
    class Own(DCFormerCompose):
        pass

    config = heads_config("gate", composed=True)
    attention = type("Variant", (HeadSystemsAttention,), {"compose_class": Own})(config, 0)
    assert type(attention.compose) is Own and type(HeadSystemsAttention(config, 0).compose) is DCFormerCompose


def test_fusing_is_refused():
    with pytest.raises(ValueError, match="a head system has its own"):
        heads_model("gate").fuse_projections()


def test_initial_values():
    torch.manual_seed(0)
    model = HeadSystemsForCausalLM(heads_config("collaborative", hidden_size=64, head_dim=64))
    assert float(model.model.layers[1].self_attn.system.mixing.weight.std()) == pytest.approx(0.2, rel=0.15)
    system = HeadSystemsForCausalLM(heads_config("pruning")).model.layers[0].self_attn.system
    assert (system.log_alpha == 3).all() and (system.eval().head_gates() == 1).all()
    config = HeadSystemsConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=16, intermediate_size=8, **PLAIN,
        head_system="collaborative", head_system_options={"mixing_init": "concatenate"},
    )  # fmt: skip
    mixing = HeadSystemsForCausalLM(config).model.layers[0].self_attn.system.mixing()
    assert torch.equal(mixing, torch.eye(4).repeat_interleave(16, dim=1))


def test_default_composes():
    """`HeadSystemsConfig` has DCFormer's defaults: composition is on unless switched off."""
    assert len(HeadSystemsConfig().compose_generators) == 4


@pytest.mark.parametrize("case", ["mixture", "pruning", "collaborative"])
def test_decoders_are_copied_between_forward_and_backward(case):
    model = heads_model(case, dtype=torch.float32).train().model
    out = model(tokens()).last_hidden_state
    copied = copy.deepcopy(model)
    out.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(copied.eval()(tokens())[0], model.eval()(tokens())[0], rtol=0, atol=0)


def test_copies_of_compiled_parts_are_not_compiled():
    """As torch's own modules: what is compiled computes with the original's parameters."""
    model = heads_model("gate", dtype=torch.float32).eval()
    attention = model.model.layers[0].self_attn
    for part in (model.model, attention, attention.system):
        part.compile(backend="eager")
    expected = model(tokens()).logits
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(copied(tokens()).logits, expected)
    with torch.no_grad():
        for parameter in copied.model.parameters():
            parameter.zero_()
    assert not copied.model(tokens())[0].any()


def test_a_class_without_a_system_does_not_load_one(tmp_path):
    """Its attention would be random."""
    heads_model("gate", dtype=torch.float32).save_pretrained(tmp_path)
    for model_class in (DCFormerForCausalLM, DHAForCausalLM):
        with pytest.raises(ValueError, match=f"head_system='output_gate', which {model_class.__name__} does not have"):
            model_class.from_pretrained(tmp_path)


def test_fewer_layers_keep_the_overlaps_of_the_first(tmp_path):
    model = heads_model("overlapped", dtype=torch.float32)
    model.config.head_system_options = {"overlap": [3, 3]}
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    assert model.config.head_system_options == {"overlap": [3]}
    model.save_pretrained(tmp_path)
    loaded = HeadSystemsForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    model.config.num_hidden_layers = 2
    assert model.config.head_system_options == {"overlap": [3, 3]}


def test_a_system_of_ones_own(tmp_path):
    """The class of docs/head_systems.md: what its model is by itself, and that it is nothing where it has no name."""
    text = (REPOSITORY / "docs" / "head_systems.md").read_text(encoding="utf-8")
    marked = r"<!-- tests/head_systems/test_head_models.py runs this -->\n```python\n(.*?)^```"
    with mock.patch.dict(HEAD_SYSTEMS):
        exec(re.search(marked, text, re.DOTALL | re.MULTILINE)[1], {"__name__": "my_heads"})
        plain = heads_model("plain", composed=True, dtype=torch.float32)
        config = HeadSystemsConfig(**{**plain.config.to_dict(), "head_system": "head_scale"})
        model = HeadSystemsForCausalLM(config).eval()
        scales = [layer.self_attn.system.scale for layer in model.model.layers]
        assert all(torch.equal(scale, torch.ones(4)) for scale in scales)
        model.load_state_dict(plain.state_dict(), strict=False)
        torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits)
        model(tokens(), labels=tokens()).loss.backward()
        assert all(scale.grad.abs().min() > 0 for scale in scales)
        scales[0].data[1] = 0.5
        logits = model(tokens()).logits
        assert not torch.allclose(logits, plain(tokens()).logits)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens(), **options), model.generate(tokens(), use_cache=False, **options))
        model.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, logits)
        with pytest.raises(ValueError, match=r"which is my_heads\.HeadScale and no part of this package"):
            dcformer.export_remote_code(tmp_path)
    with pytest.raises(ValueError, match="head_system='head_scale' is unknown: expected one of plain, "):
        AutoModelForCausalLM.from_pretrained(tmp_path)
