"""Parameter groups: every trainable parameter once, rates that follow initialization, no decay where none belongs."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from transformers import (
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from dcformer import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCViTConfig,
    DCViTForImageClassification,
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
    parameter_groups,
)
from dcformer.compose_dcformer import DCFormerCompose, compose_init_std
from dcformer.modules import DCMHA, convert_attention
from dcformer.optimization import composition_rate_ratios, names_without_decay

MODELS = {
    "default": {},
    "static, groups": {"compose_static": True, "compose_groups": 2},
    "plain": {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False},
    "no low rank": {"compose_projection": False},
    "biases, tied": {"attention_bias": True, "mlp_bias": True, "norm_type": "layernorm", "tie_word_embeddings": True},
}


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_every_trainable_parameter_is_in_one_group(fields):
    model = DCFormerForCausalLM(tiny_config(**fields))
    model.model.layers[0].mlp.up_proj.weight.requires_grad = False
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1)
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert all(group["params"] for group in groups)
    torch.optim.AdamW(groups)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_rates_and_decay_by_name(fields):
    model = DCFormerForCausalLM(tiny_config(**fields))
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, ratios="initial")
    settings = {id(p): group for group in groups for p in group["params"]}
    ratios = composition_rate_ratios(model.config)
    for name, parameter in model.named_parameters():
        group, is_composition = settings[id(parameter)], ".compose." in name
        ratio = ratios[name.rpartition(".compose.")[2]] if is_composition else 1.0
        assert group["lr"] == 1e-3 * ratio
        assert group["weight_decay"] == (0.1 if parameter.ndim > 1 and not is_composition else 0.0), name
        assert is_composition == group["name"].startswith("compose."), name


@given(
    width=st.sampled_from([64, 1024, 4096]),
    heads=st.sampled_from([4, 16, 32]),
    rank=st.integers(1, 4),
    spread=st.floats(0.005, 0.2),
)
def test_no_step_is_relatively_larger_than_that_of_an_ordinary_matrix(width, heads, rank, spread):
    config = DCFormerConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, compose_rank=rank,
        initializer_range=spread,
    )  # fmt: skip
    std = compose_init_std(config)
    for name, ratio in composition_rate_ratios(config).items():
        assert 0 < ratio <= 1
        assert ratio / std[name] <= 1 / spread * (1 + 1e-9)
        assert ratio == 1 or ratio / std[name] == pytest.approx(1 / spread)


def test_published_size_on_paper():
    """Width 1024, 16 heads, rank 2: qkw starts 144 times smaller than other matrices, gates by a factor of 9."""
    ratios = composition_rate_ratios(DCFormerConfig.from_preset("dcformer-405m"))
    assert ratios["qkw"] == pytest.approx(1 / 144)
    assert ratios["gate_proj.weight"] == pytest.approx(0.1096, abs=1e-4)
    assert ratios["dw1_proj.weight"] == ratios["pre_static"] == ratios["post_static"] == 1


def test_own_ratios_and_what_is_refused():
    model = DCFormerForCausalLM(tiny_config())
    rates = {group["name"]: group["lr"] for group in parameter_groups(model, 1e-3, ratios={"qkw": 0.1})}
    assert rates["compose.qkw"] == pytest.approx(1e-4) and rates["compose.dw1_proj"] == rates["matrices"] == 1e-3
    rates = {group["name"]: group["lr"] for group in parameter_groups(model, 1e-3, ratios=0.1)}
    assert all(rate == pytest.approx(1e-4 if name.startswith("compose.") else 1e-3) for name, rate in rates.items())
    assert "compose.gate_proj" in rates and "vectors" in rates
    for one_rate in ({}, None, 1, np.float32(1), np.int64(1)):
        assert {group["lr"] for group in parameter_groups(model, 1e-3, ratios=one_rate)} == {1e-3}
    of_numpy = parameter_groups(model, np.float32(1e-3), np.float32(0.1), ratios=np.float32(0.1))
    assert {type(group[name]) for group in of_numpy for name in ("lr", "weight_decay")} == {float}  # torch.load's
    for ratios in ("rule", True, np.True_, np.float32(math.nan), np.float32(math.inf), [0.1]):
        with pytest.raises(ValueError, match=re.escape(f"ratios={ratios!r}: expected a number above 0, 'initial'")):
            parameter_groups(model, 1e-3, ratios=ratios)
    for lr in (0, -1e-3, math.nan, math.inf, None, "1e-3"):
        with pytest.raises(ValueError, match=f"lr={lr!r}"):
            parameter_groups(model, lr)
    for decay in (-0.1, math.nan, math.inf, None):
        with pytest.raises(ValueError, match=f"weight_decay={decay}: expected a number of at least 0"):
            parameter_groups(model, 1e-3, weight_decay=decay)
    for ratio in (0, math.nan, math.inf, "a", True):
        for ratios in ({"qkw": ratio}, *([ratio] if ratio == 0 else [])):
            with pytest.raises(ValueError, match="expected numbers above 0"):
                parameter_groups(model, 1e-3, ratios=ratios)
    with pytest.raises(ValueError, match="'qkv'"):
        parameter_groups(model, 1e-3, ratios={"qkv": 0.1})


# --- models of others, and parts alone --------------------------------------------------------------------------------

LLAMA = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "initializer_range": 0.03,
}  # fmt: skip
VIT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "image_size": 16,
    "patch_size": 4, "num_labels": 3,
}  # fmt: skip
_TOWER = {"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8}
CLIP = {
    "text_config": _TOWER | {"hidden_size": 128, "vocab_size": 64, "initializer_range": 0.01},
    "vision_config": _TOWER | {"hidden_size": 64, "image_size": 16, "patch_size": 4, "initializer_range": 0.05},
}
T5 = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 1, "num_heads": 8, "vocab_size": 64}


def converted(model, **settings):
    return convert_attention(model, zero_init=False, **settings)


# Name -> the model, and what its ordinary matrices start with: a number, or one by the beginning of a part's path.
OTHERS = {
    "converted": (lambda: converted(LlamaForCausalLM(LlamaConfig(**LLAMA))), 0.03),
    "converted, static": (
        lambda: converted(
            LlamaForCausalLM(LlamaConfig(**LLAMA)), compose_static=True, compose_query=False, compose_key=False
        ),
        0.03,
    ),
    "converted, two widths": (
        lambda: converted(CLIPModel(CLIPConfig(**CLIP))), {"text_model": 0.01, "vision_model": 0.05},
    ),
    "converted, no range": (lambda: converted(T5ForConditionalGeneration(T5Config(**T5)), compose_key=False), 1 / 8),
    "DCMHA": (lambda: DCMHA(64, 8), 1 / 8),
    "DCMHA, static": (lambda: DCMHA(64, 8, compose_static=True, compose_query=False, compose_key=False), 1 / 8),
    "DCMHA, groups, rank, cross-attention": (
        lambda: DCMHA(64, 8, kdim=256, vdim=256, compose_groups=2, compose_rank=3, compose_static=True),
        {"compose.query": 1 / 8, "compose.key": 1 / 16},
    ),
    "DCMHA, gates alone": (lambda: nn.ModuleList([DCMHA(64, 8, compose_projection=False)]), 1 / 8),
    "head system": (
        lambda: HeadSystemsForCausalLM(HeadSystemsConfig(head_system="collaborative", **LLAMA | {"hidden_size": 128})),
        0.03,
    ),
    "DCViT": (lambda: DCViTForImageClassification(DCViTConfig(**VIT, compose_gate_init=0.5)), 1 / 8),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_rates_of_each_part_follow_what_it_starts_with(name):
    """The ratio of measured standard deviations, at most 1; every parameter in one group."""
    torch.manual_seed(0)
    make, ordinary = OTHERS[name]
    model = make()
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, ratios="initial")
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found)) and set(found) == {id(parameter) for parameter in model.parameters()}
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    parts = {path: part for path, part in model.named_modules() if isinstance(part, DCFormerCompose)}
    assert parts
    for path, part in parts.items():
        std = ordinary if isinstance(ordinary, float) else next(v for k, v in ordinary.items() if path.startswith(k))
        for inner, parameter in part.named_parameters():
            group, start = group_of[id(parameter)], parameter.std().item()
            assert group["name"] == f"compose.{inner.removesuffix('.weight')}" and group["weight_decay"] == 0
            spread = 5 / math.sqrt(2 * parameter.numel())  # five standard errors
            low, high = (min(1, start * factor / std) for factor in (1 - spread, 1 + spread))
            assert low <= group["lr"] / 1e-3 <= high, (path, inner)
    others = {group["lr"] for group in groups if not group["name"].startswith("compose.")}
    assert others == {1e-3}
    torch.optim.AdamW(groups)


def test_one_rate_without_composition():
    for model in (LlamaForCausalLM(LlamaConfig(**LLAMA)), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))):
        groups = parameter_groups(model, lr=1e-3, ratios={"qkw": 0.1})
        assert {group["name"]: group["lr"] for group in groups} == {"matrices": 1e-3, "vectors": 1e-3}


def test_zero_init_and_gates_from_zero_have_rates():
    """What starts at 0 to begin as plain attention is trained at the rate that it would have otherwise."""
    models = (convert_attention(LlamaForCausalLM(LlamaConfig(**LLAMA))), OTHERS["converted"][0]())
    rates = [
        {group["name"]: group["lr"] for group in parameter_groups(model, lr=1e-3, ratios="initial")} for model in models
    ]
    assert rates[0] == rates[1] and rates[0]["compose.qkw"] < 1e-4
    from_zero = DCViTForImageClassification(DCViTConfig(**VIT, compose_gate_init=0.0))
    assert all(group["lr"] > 0 for group in parameter_groups(from_zero, lr=1e-3, ratios="initial"))


@pytest.mark.parametrize(
    "options",
    [{}, {"target_modules": ["q_proj"], "modules_to_save": ["compose"]}, {"modules_to_save": ["gate_proj"]}],
    ids=["everything", "composition saved", "a layer of it saved"],
)
def test_with_adapters(options):
    """Adapters are matrices of their own; composition that is trained beside them has its rates."""
    peft = pytest.importorskip("peft")
    plain = DCFormerForCausalLM(tiny_config())
    adapted = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options))
    groups = {group["name"]: group for group in parameter_groups(adapted, lr=1e-3, ratios="initial")}
    found = [id(parameter) for group in groups.values() for parameter in group["params"]]
    assert sorted(found) == sorted(id(parameter) for parameter in adapted.parameters() if parameter.requires_grad)
    names = {id(parameter): name for name, parameter in adapted.named_parameters()}
    assert any("lora_A" in names[id(parameter)] for parameter in groups["matrices"]["params"])
    assert groups["matrices"]["weight_decay"] == 0.1
    rates = {group["name"]: group["lr"] for group in parameter_groups(plain, lr=1e-3, ratios="initial")}
    trained = {name for name in groups if name.startswith("compose.")}
    saved = {"compose": {"compose.qkw", "compose.dw1_proj", "compose.gate_proj"}, "gate_proj": {"compose.gate_proj"}}
    assert trained == (saved[options["modules_to_save"][0]] if options else set())
    assert all(groups[name]["lr"] == rates[name] for name in trained)


@pytest.mark.parametrize("how", ["pruned", "weight norm", "older weight norm", "parametrized"])
def test_what_is_pruned_or_parametrized_keeps_its_group(how):
    """Their parameters have other names."""
    model = DCFormerForCausalLM(tiny_config(head_embeddings="add", num_key_value_heads=None))
    before = parameter_groups(model, 1e-3, ratios=0.1)
    attention = model.model.layers[0].self_attn
    owners = [(attention.compose, "qkw"), (attention.compose.dw1_proj, "weight"), (attention, "k_embedding")]
    for owner, name in owners:
        if how == "pruned":
            prune.identity(owner, name)
        elif how == "weight norm":
            parametrizations.weight_norm(owner, name)
        elif how == "older weight norm":
            weight_norm(owner, name)
        else:
            parametrize.register_parametrization(owner, name, nn.Identity())
    after = parameter_groups(model, 1e-3, ratios=0.1)
    fields = ("name", "lr", "weight_decay")
    assert sorted([g[f] for f in fields] for g in after) == sorted([g[f] for f in fields] for g in before)
    more = 1 if "weight norm" in how else 0  # a length and a direction
    numbers = {group["name"]: len(group["params"]) for group in before}
    for name in ("compose.qkw", "compose.dw1_proj", "vectors"):
        numbers[name] += more
    assert {group["name"]: len(group["params"]) for group in after} == numbers
    assert len(names_without_decay(model)) == len(
        [n for n, _ in model.named_parameters() if "compose" in n or "_emb" in n]
    )


def test_trainer_takes_them_in_one_line(tmp_path):
    """The schedule scales each group's own rate, and a resumed run ends with the same weights."""

    def train(steps_saved: int, resume: str | None) -> DCFormerForCausalLM:
        torch.manual_seed(0)
        model = DCFormerForCausalLM(tiny_config())
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, model.config.vocab_size, (8, 12))]
        options = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "steps"}
        args = TrainingArguments(str(tmp_path), max_steps=4, save_steps=steps_saved, warmup_steps=2, **options)
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2, ratios="initial"))
        trainer = Trainer(model, args, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        initial = {group["name"]: group["initial_lr"] for group in optimizer.param_groups}
        assert initial["compose.qkw"] == 1e-2 * composition_rate_ratios(model.config)["qkw"] < initial["matrices"]
        return model

    whole = train(2, None).state_dict()
    resumed = train(2, str(tmp_path / "checkpoint-2")).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
