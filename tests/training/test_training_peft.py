"""Adapters on every linear layer, PEFT's other methods; quantized loading with bitsandbytes or torchao."""

import copy
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from helpers import randomize, tiny_config
from packaging.version import Version
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from dcformer import DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.cache_dcformer import CACHE_NAME

peft = pytest.importorskip("peft")
pytest.importorskip("trl")

from dcformer.training import ATTENTION_TARGETS, COMPOSE_TARGETS, LORA_TARGETS, MLP_TARGETS  # noqa: E402

# PEFT names caches as Transformers did up to 5.23. With a later one, what it generates behind prompts is wrong for any
# model, Llama included, and Transformers' own `add_adapter` asks for a newer PEFT.
later_names = pytest.mark.skipif(
    CACHE_NAME == "cache" and Version(metadata.version("peft")) < Version("0.22"),
    reason="this PEFT does not go with this Transformers",
)

IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def losses(model, steps: int = 5) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(parameters, lr=1e-2), []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adapted_modules(model) -> set[str]:
    return {
        name.partition(".lora_A")[0].rpartition("layers.")[2]
        for name, _ in model.named_parameters()
        if "lora_A" in name
    }


def test_default_targets_are_all_linear_layers():
    model = DCFormerForCausalLM(tiny_config(mlp_gates=4))
    expected = {
        name.removeprefix("model.layers.")
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "layers" in name
    }
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=LORA_TARGETS))
    assert adapted_modules(adapted) == expected
    assert len(expected) == 2 * 10


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (ATTENTION_TARGETS, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (MLP_TARGETS, {"gate_proj", "up_proj", "down_proj"}),
        (COMPOSE_TARGETS, {"dw1_proj", "gate_proj"}),
    ],
    ids=["attention", "mlp", "compose"],
)
def test_train_save_reload_merge(targets, modules, tmp_path):
    base = randomize(DCFormerForCausalLM(tiny_config()))
    model = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    )
    found = adapted_modules(model)
    assert {name.rpartition(".")[2] for name in found} == modules
    assert all(("compose" in name) == (targets is COMPOSE_TARGETS) for name in found)
    assert ("mlp" in next(iter(found))) == (targets is MLP_TARGETS)
    curve = losses(model)
    assert curve[-1] < curve[0]
    tuned = logits(model)
    assert (tuned - logits(base)).abs().max() > 1e-2

    model.save_pretrained(tmp_path / "adapter")
    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits(reloaded), tuned)
    merged = reloaded.merge_and_unload()
    assert type(merged) is DCFormerForCausalLM
    torch.testing.assert_close(logits(merged), tuned, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))


def test_adapted_model_generates_as_merged():
    """With a cache the composition weights go another way than in training; the adapters have to be on it too."""
    base = randomize(DCFormerForCausalLM(tiny_config()))
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LORA_TARGETS))
    losses(model)
    model.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    generated = model.generate(input_ids=IDS, **options)
    assert torch.equal(model.generate(input_ids=IDS, use_cache=False, **options), generated)
    assert torch.equal(model.merge_and_unload().generate(input_ids=IDS, **options), generated)


def test_whole_composition_can_be_trained_beside_adapters(tmp_path):
    base = randomize(DCFormerForCausalLM(tiny_config()))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=[*ATTENTION_TARGETS, *MLP_TARGETS], modules_to_save=["compose"]
    )
    model = peft.get_peft_model(copy.deepcopy(base), config)
    losses(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(name.endswith("qkw") for name in trained) == 2
    tuned = logits(model)
    model.save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    torch.testing.assert_close(logits(merged), tuned, rtol=1e-4, atol=1e-4)


# --- defaults of PEFT's configurations --------------------------------------------------------------------------------


def pythia() -> DCPythiaForCausalLM:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return randomize(DCPythiaForCausalLM(DCPythiaConfig(num_attention_heads=4, sliding_window=8, **sizes)))


MODELS = {"dcformer": lambda: randomize(DCFormerForCausalLM(tiny_config())), "dcpythia": pythia}
LLAMA_ATTENTION = {"q_proj", "v_proj"}
DEFAULTS = {  # method: (its configuration, what it changes)
    "lora": (lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2), None),
    "ia3": (lambda: peft.IA3Config(task_type="CAUSAL_LM"), {"k_proj", "v_proj", "down_proj"}),
    "adalora": (lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=9), LLAMA_ATTENTION),
    "vera": (lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=2), LLAMA_ATTENTION),
    "loha": (lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=2), LLAMA_ATTENTION),
    "norms": (
        lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
        {"input_layernorm", "post_attention_layernorm", "norm"},
    ),
}


@pytest.mark.parametrize("method", DEFAULTS)
@pytest.mark.parametrize("name", MODELS)
def test_methods_without_target_modules(name, method):
    config, modules = DEFAULTS[method]
    model = peft.get_peft_model(MODELS[name](), config())
    assert {target.rpartition(".")[2] for target in model.targeted_module_names} == (
        modules or {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj", "dw1_proj"}
    )
    if method == "lora":  # as `--use_peft`
        explicit = peft.get_peft_model(MODELS[name](), peft.LoraConfig(r=2, target_modules=LORA_TARGETS))
        assert model.targeted_module_names == explicit.targeted_module_names
        assert len(model.targeted_module_names) == 2 * (9 if name == "dcformer" else 8)
    curve = losses(model)
    assert curve[-1] < curve[0]


@later_names
def test_adapters_added_by_transformers_need_no_target_modules(tmp_path):
    base = randomize(DCFormerForCausalLM(tiny_config()))
    again = copy.deepcopy(base)
    base.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False))
    tuned = logits(base)
    base.save_pretrained(tmp_path)
    again.load_adapter(tmp_path)
    assert torch.equal(logits(again), tuned)
    again.disable_adapters()
    assert (logits(again) - tuned).abs().max() > 1e-2


def test_what_the_user_told_peft_is_kept():
    table = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    before = table.get("dcformer")
    table["dcformer"] = ["o_proj"]
    try:
        model = peft.get_peft_model(DCFormerForCausalLM(tiny_config()), peft.LoraConfig(r=2))
        assert {name.rpartition(".")[2] for name in model.targeted_module_names} == {"o_proj"}
    finally:
        table.pop("dcformer")
        if before is not None:
            table["dcformer"] = before


def test_importing_the_package_does_not_import_peft():
    code = "import sys, dcformer; dcformer.DCFormerConfig().to_dict(); sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@later_names
@pytest.mark.parametrize("method", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_are_trained(name, method):
    extra = {"encoder_hidden_size": 16} if method == "PromptEncoderConfig" else {}
    model = peft.get_peft_model(
        MODELS[name](), getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=9, **extra)
    )
    curve = losses(model)
    assert curve[-1] < curve[0]
    model.eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    generated = model.generate(input_ids=IDS, **options)
    for step in range(6):  # one forward pass each, without a cache
        out = model(input_ids=generated[:, : IDS.shape[1] + step])
        assert torch.equal(out.logits[:, -1].argmax(-1), generated[:, IDS.shape[1] + step])


@later_names
@pytest.mark.parametrize("name", MODELS)
def test_prefix_tuning_is_refused_with_the_reason(name):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(MODELS[name](), config)
    with pytest.raises(ValueError, match=rf"^{CACHE_NAME} is .*prefix.*prompt tuning and LoRA.*composition weights"):
        model(input_ids=IDS)
    with pytest.raises(ValueError, match="prefix tuning"):
        model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, pad_token_id=0)


def test_prefix_tuning_without_key_wise_composition():
    """Nothing rides behind such a model's keys, so that a prefix lacks nothing."""
    base = randomize(DCFormerForCausalLM(tiny_config(compose_key=False)))
    model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    curve = losses(model)
    assert curve[-1] < curve[0]


def test_dcpythia():
    config = DCPythiaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        sliding_window=8,
    )
    model = peft.get_peft_model(
        randomize(DCPythiaForCausalLM(config)), peft.LoraConfig(r=2, target_modules=LORA_TARGETS)
    )
    assert len(adapted_modules(model)) == 2 * 8  # a plain MLP has no gate_proj
    curve = losses(model)
    assert curve[-1] < curve[0]


def quantizable(tmp_path):
    """bitsandbytes' 4-bit product on CPUs wants inputs of a multiple of 64 and outputs of a multiple of 32."""
    config = tiny_config(hidden_size=128, intermediate_size=192, num_attention_heads=8, num_key_value_heads=8)
    model = DCFormerForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.05), (4, 0.3)])
def test_bitsandbytes(bits, tolerance, tmp_path):
    pytest.importorskip("bitsandbytes")
    model, folder = quantizable(tmp_path)
    quantization = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
    assert loaded.get_memory_footprint() < 0.6 * model.get_memory_footprint()
    difference = (logits(loaded).float() - logits(model)).norm() / logits(model).norm()
    assert difference < tolerance
    # a fresh one: evaluating has repacked 4-bit weights for a product that has no gradient
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
    prepared = peft.prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
    adapted = peft.get_peft_model(prepared, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LORA_TARGETS))
    curve = losses(adapted)
    assert curve[-1] < curve[0]


def test_torchao(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    model, folder = quantizable(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig())
    )
    assert (logits(loaded) - logits(model)).norm() / logits(model).norm() < 0.05
