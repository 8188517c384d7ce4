"""Removing heads leaves the logits; ranking them finds those that matter."""

from pathlib import Path

import pytest
import torch
from head_cases import heads_model, tokens
from helpers import PLAIN, REPOSITORY, randomize, tiny_config
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer import DCFormerForCausalLM, DCFormerModel, to_head_system
from dcformer.analysis import attribute_heads
from dcformer.head_systems import head_importance, prune_heads, system_costs
from dcformer.head_systems.rank_heads import main


def closed(model, *heads):
    """Closes some gates, (layer, head), and leaves others half open."""
    for index, layer in enumerate(model.model.layers):
        with torch.no_grad():
            layer.self_attn.system.log_alpha.copy_(torch.linspace(-1, 3, 4))
            layer.self_attn.system.log_alpha[[head for at, head in heads if at == index]] = -4.0
    return model


CLOSED = {
    "some": [(0, 1), (1, 0), (1, 3)],
    "a whole group": [(0, 0), (0, 1), (1, 3)],
    "all of a layer": [(0, 0), (0, 1), (0, 2), (0, 3)],
    "uneven groups": [(0, 2), (1, 1)],
    "none": [],
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("composed", [False, True], ids=["plain", "composed"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("heads", CLOSED.values(), ids=CLOSED)
@torch.no_grad()
def test_logits_stay(heads, kv_heads, composed, bias, tmp_path):
    model = heads_model("pruning", composed, torch.float32, num_key_value_heads=kv_heads, attention_bias=bias)
    ids, expected = tokens(), closed(model, *heads)(tokens()).logits
    before = system_costs(model.config).parameters
    removed = prune_heads(model)
    found = model(ids).logits
    assert float((found - expected).abs().max()) < 1e-6 * float(expected.abs().max().clamp(min=1))
    assert removed == before - system_costs(model.config).parameters
    assert (removed > 0) == bool(heads)
    assert sum(p.numel() for p in model.parameters()) == before - removed
    assert prune_heads(model) == 0  # also where a layer's last head is closed
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, found, atol=1e-6, rtol=1e-6)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(ids, **options), loaded.generate(ids, use_cache=False, **options))


def test_predicted_number():
    """Two of four heads of one layer: their rows of q, k, v, their columns of o, and their gates."""
    model = closed(heads_model("pruning", dtype=torch.float32, num_key_value_heads=4), (0, 1), (0, 2))
    assert prune_heads(model) == 2 * (4 * 32 * 8 + 1)
    assert model.config.head_system_options["kept_heads"] == [[0, 3], [0, 1, 2, 3]]


def test_pruned_models_train():
    model = closed(heads_model("pruning", dtype=torch.float32), (0, 1), (1, 0))
    prune_heads(model)
    model.train()(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_other_systems_have_nothing_to_prune():
    with pytest.raises(ValueError, match="head_system is not 'head_pruning'"):
        prune_heads(heads_model("gate"))


def test_projections_with_adapters_are_refused_before_anything_is_removed():
    model = closed(heads_model("pruning", dtype=torch.float32), (0, 1), (1, 0))
    get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="merge adapters"):
        prune_heads(model)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("switches", [PLAIN, {}], ids=["plain", "composed"])
def test_importance_is_the_gradient_of_gates(switches):
    """Against the difference of losses when a head's output is scaled a little; a dead head matters nothing."""
    source = randomize(DCFormerForCausalLM(tiny_config(**switches))).double()
    with torch.no_grad():
        source.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0
    batches = [{"input_ids": row[None], "labels": row[None]} for row in tokens(3)]
    found = head_importance(source, batches)
    assert found.shape == (2, 4) and found[1, 1] == 0 and (found.flatten().sort().values[1:] > 0).all()
    step, total = 1e-5, 0.0
    with torch.no_grad():
        for batch in batches:
            losses = []
            for factor in (1 + step, 1 - step):
                columns = source.model.layers[0].self_attn.o_proj.weight[:, 16:24]
                kept = columns.clone()
                columns.mul_(factor)
                logits = source(batch["input_ids"]).logits[0, :-1]  # the model's own loss is in float32
                losses.append(float(torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:])))
                columns.copy_(kept)
            total += abs(losses[0] - losses[1]) / (2 * step) / len(batches)
    assert float(found[0, 2]) == pytest.approx(total, rel=1e-4)


def test_gates_of_a_trained_model_are_left_out_of_its_ranking():
    """As of the model that it was made from; removed heads have 0, and the model stays as it is."""
    source = randomize(DCFormerForCausalLM(tiny_config(**PLAIN))).double()
    model, batches = to_head_system(source, "head_pruning").train(), [{"input_ids": tokens(), "labels": tokens()}]
    expected = head_importance(source, batches)
    closed(model, (0, 1), (1, 0))
    assert torch.equal(head_importance(model, batches), expected)
    assert model.training and all(layer.self_attn.system.fixed_gates is None for layer in model.model.layers)
    prune_heads(model)
    assert (head_importance(model, batches) == 0).nonzero().tolist() == [[0, 1], [1, 0]]


IDS = tokens(1)
LORA = LoraConfig(target_modules=["o_proj"])
MHE = PLAIN | {"num_key_value_heads": 1, "head_embeddings": "mul"}
DHA = PLAIN | {"num_key_value_heads": 4, "key_head_map": [[0, 0, 1, 1]] * 2}


@pytest.mark.parametrize(
    ("make", "batches", "error", "says"),
    [
        (DCFormerForCausalLM, [{"input_ids": IDS}], ValueError, "no loss for a batch of input_ids: give `labels`"),
        (DCFormerModel, [{"input_ids": IDS}], ValueError, "a DCFormerModel has no loss .* a model with a head"),
        (DCFormerForCausalLM, {"input_ids": IDS}, TypeError, "batches is a dict of str: expected dictionaries"),
        (DCFormerForCausalLM, IDS, TypeError, "batches is a Tensor of Tensor: expected dictionaries"),
        (DCFormerForCausalLM, [], ValueError, "no batches"),
        (
            lambda _: heads_model("gate"),
            [],
            ValueError,
            "head_system='output_gate': heads are ranked in models without",
        ),
        (
            lambda _: DCFormerForCausalLM(tiny_config(**MHE)),
            [],
            ValueError,
            "the model has head_embeddings: heads are ranked by gates of 'head_pruning', which does not go with these",
        ),
        (
            lambda _: DCFormerForCausalLM(tiny_config(**DHA)),
            [],
            ValueError,
            r"the model has key_head_map: .*attribute_he",
        ),
        (lambda _: torch.nn.Linear(2, 2), [], TypeError, "model is a Linear"),
        (lambda _: get_peft_model(heads_model("pruning"), LORA), [], TypeError, "model is a PeftModel: expected"),
        (
            DCFormerForCausalLM,
            [{"input_ids": IDS, "labels": torch.full_like(IDS, -100)}],
            ValueError,
            r"batch 0 \(loss nan\) has a loss or gradients that are not finite",
        ),
    ],
)
def test_what_cannot_be_ranked_is_named(make, batches, error, says):
    with pytest.raises(error, match=says) as raised:
        head_importance(make(tiny_config()), batches)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fields", [MHE, DHA], ids=["mhe", "dha"])
def test_what_is_recommended_for_them_ranks_their_heads(fields):
    model = DCFormerForCausalLM._from_config(tiny_config(**fields), attn_implementation="eager").eval()
    assert attribute_heads(model, IDS, target=5).any()


@pytest.mark.parametrize(
    ("case", "says"),
    [("decoder", "lacks lm_head.weight: give"), ("nan", r"batch 0 \(loss nan\) has a loss"), ("pruning", None)],
)
def test_the_command_refuses_what_it_cannot_rank(case, says, tmp_path, capsys):
    """Parameters that are missing, and so random, or not finite. Gated models it ranks."""
    folder, text = next((REPOSITORY / "checkpoints").iterdir()), tmp_path / "text.txt"
    text.write_text("Peter owns the desk. Boris owns the tuna. " * 20)
    model = DCFormerForCausalLM.from_pretrained(folder)
    if case == "pruning":
        model = to_head_system(model, "head_pruning")
    elif case == "nan":
        torch.nn.init.constant_(model.model.layers[0].mlp.down_proj.weight, float("nan"))
    (model.model if case == "decoder" else model).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    arguments = [str(tmp_path), str(text), "--rows", "1", "--length", "16"]
    if says is None:
        main(arguments)
        assert len(capsys.readouterr().out.splitlines()) == 1 + 4 * 8
    else:
        with pytest.raises(SystemExit, match=f"^error: .*{says}"):
            main(arguments)
        assert not capsys.readouterr().out


def test_the_command_ranks_heads(tmp_path, capsys):
    folder = next((REPOSITORY / "checkpoints").iterdir())
    text = tmp_path / "text.txt"
    text.write_text("Peter owns the desk. Boris owns the tuna. " * 20)
    main([str(folder), str(text), "--rows", "2", "--length", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert "over 2 rows of at most 32 tokens" in lines[0] and len(lines) == 1 + 4 * 8
    values = [float(line.split(": ")[1]) for line in lines[1:]]
    assert values == sorted(values, reverse=True) and values[0] > 0
    for wrong in (["nowhere", str(text)], [str(folder), str(text), "--rows", "0"]):
        with pytest.raises(SystemExit):
            main(wrong)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("the text itself", "No such file or directory"),
        ("a folder", "Is a directory"),
        ("bytes", "'utf-8' codec can't decode byte 0xff in position 0: .*"),
    ],
)
def test_the_command_asks_for_a_file_with_text(file, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a folder").mkdir()
    Path("bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit, match=rf"^error: '{file}' \({reason}\): expected the path of a file with text in"):
        main([str(next((REPOSITORY / "checkpoints").iterdir())), file])


def test_conversion_begins_with_open_gates():
    source = randomize(DCFormerForCausalLM(tiny_config())).double()
    model = to_head_system(source, "head_pruning")
    assert prune_heads(model) == 0
    with pytest.raises(ValueError, match="kept_heads: a conversion begins with all heads"):
        to_head_system(source, "head_pruning", kept_heads=[[0], [0, 1]])


def pruned():
    model = closed(heads_model("pruning", False, torch.float32), (0, 1), (1, 0), (1, 3))
    prune_heads(model)
    return model


def test_layers_that_change_places_take_their_heads_with_them(tmp_path):
    """Layers are saved and loaded by `kept_heads`: with the lists of other layers they are refused."""
    model = pruned()
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[::-1])
    model.config.layer_types.reverse()
    expected = r"layer 0 has the heads \[1, 2\], kept_heads of the configuration asks for \[0, 2, 3\]"
    for use in (lambda: model(tokens()), lambda: model.save_pretrained(tmp_path / "out")):
        with pytest.raises(ValueError, match=expected):
            use()
    assert not (tmp_path / "out").exists()
    model.config.head_system_options["kept_heads"].reverse()
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, atol=1e-6, rtol=1e-6)


def test_fewer_layers_keep_the_heads_of_the_first(tmp_path):
    model = pruned()
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", num_hidden_layers=1)
    assert loaded.config.head_system_options["kept_heads"] == [[0, 2, 3]]
    loaded.save_pretrained(tmp_path / "one")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    for other in (loaded, again):
        torch.testing.assert_close(other(tokens()).logits, model(tokens()).logits, atol=1e-6, rtol=1e-6)
    model.config.num_hidden_layers = 2  # as when drafting with few layers ends
    assert model.config.head_system_options["kept_heads"] == [[0, 2, 3], [1, 2]]
    assert not any(name.startswith("_all") for name in model.config.to_dict())
