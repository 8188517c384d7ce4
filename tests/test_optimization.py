"""Parameter groups: every trainable parameter once, rates that follow initialisation, no decay where none belongs."""

import pytest
import torch
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer, TrainingArguments

from dcformer import DCFormerConfig, DCFormerForCausalLM, parameter_groups
from dcformer.compose_dcformer import compose_init_std
from dcformer.optimization import composition_rate_ratios

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
    settings = {id(p): group for group in parameter_groups(model, lr=1e-3, weight_decay=0.1) for p in group["params"]}
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
    assert {group["lr"] for group in parameter_groups(model, 1e-3, ratios={})} == {1e-3}
    with pytest.raises(ValueError, match="lr=0"):
        parameter_groups(model, 0)
    with pytest.raises(ValueError, match="'qkv'"):
        parameter_groups(model, 1e-3, ratios={"qkv": 0.1})


def test_trainer_takes_them_in_one_line(tmp_path):
    """The schedule scales each group's own rate, and a resumed run ends with the same weights."""

    def train(steps_saved: int, resume: str | None) -> DCFormerForCausalLM:
        torch.manual_seed(0)
        model = DCFormerForCausalLM(tiny_config())
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, model.config.vocab_size, (8, 12))]
        options = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "steps"}
        args = TrainingArguments(str(tmp_path), max_steps=4, save_steps=steps_saved, warmup_steps=2, **options)
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2))
        trainer = Trainer(model, args, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        initial = {group["name"]: group["initial_lr"] for group in optimizer.param_groups}
        assert initial["compose.qkw"] == 1e-2 * composition_rate_ratios(model.config)["qkw"] < initial["matrices"]
        return model

    whole = train(2, None).state_dict()
    resumed = train(2, str(tmp_path / "checkpoint-2")).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
