"""What examples/finetune.py and examples/pretrain.py do, at small sizes, and TRL's trainers on our models."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import REPOSITORY, hear, tiny_config
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytest.importorskip("trl")

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune
import pretrain

from dcformer import DCFormerForCausalLM, export_remote_code, to_head_system
from dcformer.errors import DCFormerError
from dcformer.modules import convert_attention, from_pretrained_converted
from dcformer.optimization import composition_rate_ratios, parameter_groups
from dcformer.training import (
    LORA_TARGETS,
    DataArguments,
    NewModelArguments,
    PretrainingConfig,
    paper_learning_rate,
    prepare_finetuning,
    prepare_pretraining,
    train,
)
from dcformer.training import arguments as training_arguments
from dcformer.training.arguments import parse, with_recipe

CHECKPOINT = str(REPOSITORY / "checkpoints" / "dcformer-synthetic")
TEXT = str(REPOSITORY / "examples" / "data" / "text_test.jsonl")
CHAT = str(REPOSITORY / "examples" / "data" / "chat_test.jsonl")
TEMPLATE = str(REPOSITORY / "examples" / "data" / "chat_template.jinja")
QUICK = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "4"]
TUNE = [*QUICK, "--model_name_or_path", CHECKPOINT]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def prepare(tmp_path, *arguments: str):
    return prepare_finetuning([*TUNE, "--output_dir", str(tmp_path / "out"), "--max_steps", "1", *arguments])[0]


def losses(folder) -> list[float]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_converted_models_are_trained_with_their_composition(tmp_path):
    """And saved with it: the library's own class would load, and train, the plain model."""
    folder = tmp_path / "converted"
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes))
    convert_attention(model)
    before = {name: p.clone() for name, p in model.named_parameters() if ".compose." in name}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trainer = prepare(tmp_path, "--data", TEXT, "--model_name_or_path", str(folder), "--max_steps", "3")
    train(trainer)
    assert "from_pretrained_converted" in (tmp_path / "out" / "README.md").read_text()
    after = from_pretrained_converted(tmp_path / "out", AutoModelForCausalLM).state_dict()
    assert before and before.keys() <= after.keys()
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(DCFormerError, match=r"takes no rows without padding: leave --packing"):
        prepare(tmp_path / "packed", "--data", TEXT, "--model_name_or_path", str(folder), "--packing")
    (tmp_path / "noted" / "out").mkdir(parents=True)
    (tmp_path / "noted" / "out" / "README.md").write_text("mine")
    options = ["--model_name_or_path", str(folder), "--save_strategy", "no"]
    train(prepare(tmp_path / "noted", "--data", TEXT, *options))
    assert (tmp_path / "noted" / "out" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("whole", [True, False])
def test_a_composition_that_hardly_trains_is_told(whole, tmp_path, monkeypatch, caplog):
    """Of a new one `qkw` has zeros, and adapters of the layer before it get nearly no gradient."""
    hear(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes))
    convert_attention(model).save_pretrained(tmp_path / "converted")
    tokenizer.save_pretrained(tmp_path / "converted")
    options = ["--lora_modules_to_save", "compose"] if whole else []
    source = ["--model_name_or_path", str(tmp_path / "converted")]
    trainer = prepare(tmp_path, "--data", TEXT, "--use_peft", *source, *options)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert any(name.endswith(".qkw") for name in trained) == whole
    assert ("add --lora_modules_to_save compose" in caplog.text) != whole


@pytest.mark.parametrize("before", [412, 512])
def test_adapters_of_a_vocabulary_that_changed(before, tmp_path, monkeypatch, caplog):
    """TRL adds the tokens of the template's tokenizer, and some more, or fewer; adapters fit the model with as many."""
    hear(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = Path(TEMPLATE).read_text()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    model.resize_token_embeddings(before)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    source = ["--model_name_or_path", str(tmp_path / "model")]
    options = ["--data", CHAT, "--use_peft", *source, "--chat_template_path"]
    prepare(tmp_path / "a", *options, TEMPLATE)
    assert "resize_token_embeddings" not in caplog.text
    tokenizer.add_tokens(["<turn>"])
    tokenizer.save_pretrained(tmp_path / "more")
    train(prepare(tmp_path / "b", *options, str(tmp_path / "more")))
    told = rf"changed from {before} to (\d+)\. .* call resize_token_embeddings\(\1\)"
    (size,) = re.findall(told, caplog.text)
    assert 412 < int(size) < 512
    model.resize_token_embeddings(int(size))
    adapted = PeftModel.from_pretrained(model, tmp_path / "b" / "out")
    assert adapted(torch.arange(3)[None]).logits.shape == (1, 3, int(size))


def test_choices_in_a_file_are_those_of_the_command_line(tmp_path):
    """TRL's "wrapped" does not keep documents apart."""
    file = tmp_path / "run.yaml"
    file.write_text("packing: true\npacking_strategy: wrapped\n")
    with pytest.raises(DCFormerError, match="packing_strategy is 'wrapped': expected one of bfd, bfd_split"):
        prepare(tmp_path, "--data", TEXT, "--config", str(file))
    file.write_text("log_level: [warning]\n")  # the library keeps these choices in a dictionary
    with pytest.raises(DCFormerError, match=r"log_level is \['warning'\]: expected one of detail, debug, info"):
        prepare(tmp_path, "--data", TEXT, "--config", str(file))


def test_held_out_rows_are_packed_with_the_others_only(tmp_path):
    """TRL would join their documents, and give neither positions nor a mask that keep them apart."""
    with pytest.raises(DCFormerError, match=r"eval_packing is True without packing: .*Give --packing, too"):
        prepare(tmp_path, "--data", TEXT, "--eval_rows", "8", "--eval_packing", "True")
    packed = ["--data", TEXT, "--eval_rows", "8", "--eval_packing", "True", "--packing", "--max_length", "64"]
    batch = next(iter(prepare(tmp_path, *packed).get_eval_dataloader()))
    assert (batch["position_ids"] == 0).sum() > 1  # documents begin anew


def test_losses_of_head_systems_are_trained(tmp_path):
    """TRL goes past the model's head, which adds them; accumulated batches share them."""
    folder = tmp_path / "mixture"
    plain = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    to_head_system(plain, "mixture_of_heads", num_routed_heads_per_tok=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(folder)
    trainer = prepare(tmp_path, "--data", TEXT, "--model_name_or_path", str(folder))
    model, batch = trainer.model.train(), next(iter(trainer.get_train_dataloader()))
    systems = [module for module in model.modules() if hasattr(module, "aux_loss_coef")]
    aux = model(**batch).aux_loss.item()
    number, trainer.current_gradient_accumulation_steps = (batch["labels"][:, 1:] != -100).sum(), 2
    for arguments, share in (({}, 1), ({"num_items_in_batch": number}, 0.5)):
        found = []
        for coefficient in (0.0, 5.0):
            for system in systems:
                system.aux_loss_coef = coefficient
            found.append(trainer.compute_loss(model, dict(batch), **arguments))
        assert (found[1] - found[0]).item() == pytest.approx(5 * share * aux, rel=1e-4)
        assert found[1].requires_grad
    assert model.base_model.take_loss() is None  # no graph is left behind
    with pytest.raises(DCFormerError, match=r"label_smoothing_factor 0\.1: .*head_system='mixture_of_heads'"):
        prepare(tmp_path, "--data", TEXT, "--model_name_or_path", str(folder), "--label_smoothing_factor", "0.1")


def test_the_folder_of_a_checkpoint_is_there_before_it_is_looked_for(tmp_path, monkeypatch):
    """As the library does in each process, before shards of FSDP would make it."""
    trainer, seen = prepare(tmp_path, "--data", TEXT), []
    monkeypatch.setattr(SFTTrainer, "_save_checkpoint", lambda *_: seen.extend((tmp_path / "out").glob("checkpoint-*")))
    trainer.state.global_step = 7
    trainer._save_checkpoint(trainer.model, None)
    assert [folder.name for folder in seen] == ["checkpoint-7"]


def test_defaults_are_the_papers_recipe(tmp_path):
    trainer = prepare(tmp_path, "--data", TEXT)
    args = trainer.args
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)
    assert args.get_warmup_steps(1000) == 10
    assert not args.bf16 and not args.gradient_checkpointing
    trainer.create_optimizer_and_scheduler(100)
    schedule = trainer.lr_scheduler.lr_lambdas[0]
    assert schedule(1) == 1 and schedule(100) == pytest.approx(0.1)
    assert [paper_learning_rate(n) for n in (405e6, 834e6, 1.4e9)] == [3e-4, 2.5e-4, 2e-4]
    assert PretrainingConfig(output_dir=str(tmp_path)).packing


def test_packed_documents_do_not_see_one_another(tmp_path):
    """A packed batch gives each document the logits that it has alone: positions restart, attention stops there."""
    trainer = prepare(tmp_path, "--data", TEXT, "--packing")
    batch = next(iter(trainer.get_train_dataloader()))
    positions, ids = batch["position_ids"][0], batch["input_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    assert len(starts) > 8 and "attention_mask" not in batch
    assert positions.max() < 512
    assert (batch["labels"][0][starts] == -100).all()  # nothing predicts a document's first token
    with torch.no_grad():
        packed = trainer.model.eval()(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        for start, end in itertools.pairwise(starts[:4]):
            alone = trainer.model(input_ids=ids[None, start:end]).logits[0]
            torch.testing.assert_close(packed[start:end], alone, rtol=1e-4, atol=1e-4)


def test_loss_on_assistant_turns_only(tmp_path):
    trainer = prepare(tmp_path, "--data", CHAT, "--chat_template_path", TEMPLATE, "--assistant_only_loss")
    row = trainer.train_dataset[0]
    conversation = json.loads(Path(CHAT).read_text().splitlines()[0])["messages"]
    scored = [token for token in row["labels"] if token != -100]
    tokenizer = trainer.processing_class
    ended = [[turn["content"], tokenizer.eos_token] for turn in conversation[1::2]]
    assert tokenizer.convert_ids_to_tokens(scored) == list(itertools.chain(*ended))
    assert tokenizer.decode(row["input_ids"]).startswith("\n" + conversation[0]["content"])


def test_turns_of_a_tokenizer_without_an_end():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template, tokenizer.eos_token = Path(TEMPLATE).read_text(), None
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "\nuser assistant\nuser"


def test_fused_cross_entropy_is_the_models_loss(tmp_path):
    """TRL's fused language-model head, which never makes all logits, against the loss of our forward, which does."""
    trainer = prepare(tmp_path, "--data", TEXT)
    batch = next(iter(trainer.get_train_dataloader()))
    calls = []
    trainer.model.lm_head.register_forward_hook(lambda *_: calls.append("all logits"))
    with torch.no_grad():
        fused = trainer.compute_loss(trainer.model, dict(batch))
        assert not calls
        plain = trainer.model(**batch).loss
        assert calls == ["all logits"]
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_finetune_yaml_evaluation_tensorboard_and_reload(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {CHECKPOINT}\ndata: {CHAT}\nchat_template_path: {TEMPLATE}\nassistant_only_loss: true\n"
        "eval_rows: 20\nmax_steps: 100\nlearning_rate: 3.0e-3\n"
    )
    out = tmp_path / "out"
    flags = ["--config", str(config), "--output_dir", str(out), *QUICK, "--report_to", "tensorboard"]
    flags += ["--per_device_train_batch_size", "32", "--max_steps", "12", "--logging_steps", "4"]  # before the file
    summary = finetune.main(flags)
    printed = capsys.readouterr().out
    assert f"held-out accuracy: {summary['before']:.1%} before, {summary['after']:.1%} after" in printed
    assert "trains 1,007,872 of 1,007,872 parameters" in printed
    curve = losses(out)
    assert len(curve) == 3 and curve[-1] < curve[0]
    assert list(out.glob("runs/*/events*"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    turns = [{"role": "user", "content": "Here are Rome, Oslo, Lima. Which is first?"}]
    chat = tokenizer.apply_chat_template(turns, return_tensors="pt")
    answer = model.generate(**chat, max_new_tokens=8, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert len(tokenizer.decode(answer[0])) > 2
    assert answer[1:].tolist() == [tokenizer.eos_token_id]  # it has learned to stop


def test_held_out_accuracy_is_the_share_of_tokens(tmp_path):
    """Rows of very different lengths in batches of 3: the mean of the batches' accuracies is another number."""
    rows = [json.loads(line)["text"] for line in Path(TEXT).read_text().splitlines()[:10]]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text[: 40 * (i + 1)]}) + "\n" for i, text in enumerate(rows)))
    trainer = prepare(tmp_path, "--data", TEXT, "--eval_data", str(file), "--per_device_eval_batch_size", "3")
    right = total = 0
    batches = []
    with torch.no_grad():
        for row in trainer.eval_dataset:
            ids = torch.tensor([row["input_ids"]])
            hits = trainer.model.eval()(input_ids=ids).logits[0, :-1].argmax(-1) == ids[0, 1:]
            right, total = right + hits.sum().item(), total + len(hits)
            batches.append(hits.float().mean().item())
    metrics = trainer.evaluate()
    assert metrics["eval_token_accuracy"] == right / total
    assert metrics["eval_mean_token_accuracy"] != metrics["eval_token_accuracy"]  # TRL's
    assert abs(sum(batches) / len(batches) - right / total) > 1e-3


@pytest.mark.long
def test_finetuning_raises_held_out_accuracy(tmp_path):
    """The bundled checkpoint, which was trained on answers only, learns the texts themselves."""
    flags = ["--data", TEXT.replace("test", "train"), "--eval_data", TEXT, "--packing", "--max_length", "128", *TUNE]
    flags += ["--max_steps", "120", "--learning_rate", "2e-3", "--logging_steps", "20", "--save_strategy", "no"]
    summary = finetune.main([*flags, "--output_dir", str(tmp_path)])
    assert summary["margin"] > 0.2 and summary["before"] < 0.1
    curve = losses(tmp_path)
    assert len(curve) == 6 and curve[-1] < 0.6 * curve[0]


def test_early_stop_keeps_the_best(tmp_path, capsys):
    flags = ["--data", TEXT, "--eval_rows", "10", "--early_stopping_patience", "1", "--save_steps", "1"]
    flags += ["--learning_rate", "1.0", "--warmup_steps", "0", "--max_steps", "20", "--output_dir", str(tmp_path)]
    summary = finetune.main([*TUNE, *flags])
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] < 20
    assert summary["eval_loss"] == pytest.approx(state["best_metric"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--bf16"],
        ["--gradient_accumulation_steps", "2", "--gradient_checkpointing"],
        ["--use_peft", "--gradient_checkpointing"],
        ["--streaming", "--packing", "--max_length", "100"],
        pytest.param(
            ["--torch_compile", "--torch_compile_backend", "aot_eager", "--pad_to_multiple_of", "128"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_options(flags, tmp_path):
    flags = [*flags, "--data", TEXT, "--max_steps", "6", "--logging_steps", "1", "--learning_rate", "3e-3"]
    finetune.main([*TUNE, *flags, "--output_dir", str(tmp_path)])
    curve = losses(tmp_path)
    assert curve[-1] < curve[0]


def test_pretrain_streams_from_a_preset(tmp_path):
    overrides = "{num_hidden_layers: 2, hidden_size: 32, intermediate_size: 64, num_attention_heads: 4, head_dim: 8, "
    overrides += "sliding_window: 16, max_position_embeddings: 128}"
    flags = ["--tokenizer", CHECKPOINT, "--config_overrides", overrides, "--data", TEXT, "--streaming", *QUICK]
    flags += ["--max_steps", "8", "--logging_steps", "1", "--learning_rate", "1e-2", "--output_dir", str(tmp_path)]
    pretrain.main(flags)
    curve = losses(tmp_path)
    assert curve[-1] < curve[0] - 0.3
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert (config.vocab_size, config.hidden_size, config.pad_token_id) == (412, 32, 0)


def test_overrides_of_the_command_line_are_added_to_those_of_the_file(tmp_path):
    """They win field by field, as do layer_pattern and rope_theta, which are not fields."""
    overrides = '{"num_hidden_layers": 2, "layer_pattern": "LG", "rope_theta": 5e4}'
    flags = ["--config", "examples/configs/pretrain_tiny.yaml", "--config_overrides", overrides, *QUICK]
    trainer, _ = prepare_pretraining([*flags, "--max_steps", "1", "--output_dir", str(tmp_path)])
    config = trainer.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.sliding_window) == (2, 128, 32)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.rope_parameters["rope_theta"] == 50000


RATES = ["--tokenizer", CHECKPOINT, "--config_overrides", "{num_hidden_layers: 1, hidden_size: 64, head_dim: 4}"]
RATES += ["--data", TEXT, "--max_steps", "1", "--learning_rate", "1e-3", "--use_cpu", "--report_to", "none"]
RATES += ["--max_length", "64"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--compose_rates", "initial"], None),
        ([], 1),
        (["--compose_rates", "0.1", "--optim", "adamw_torch"], 0.1),
    ],
    ids=str,
)
def test_rates_of_composition(flags, expected, tmp_path):
    """Their own where they are asked for."""
    trainer, _ = prepare_pretraining([*RATES, *flags, "--output_dir", str(tmp_path)])
    trainer.create_optimizer()
    rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    compose = trainer.model.model.layers[0].self_attn.compose
    ratio = rates[id(compose.qkw)] / rates[id(trainer.model.lm_head.weight)]
    assert ratio == pytest.approx(expected or composition_rate_ratios(trainer.model.config)["qkw"])


@pytest.mark.parametrize("adapters", [False, True])
def test_composition_gets_no_weight_decay(adapters, tmp_path):
    """The same parameters decay as in the groups of `parameter_groups`; adapters do, on composition too."""
    trainer, _ = prepare_pretraining([*RATES, "--output_dir", str(tmp_path)])
    if adapters:
        targets = ["q_proj", "compose.dw1_proj"]
        trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=targets, modules_to_save=["lm_head"]))
    trainer.create_optimizer()
    found = {id(p) for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    groups = parameter_groups(trainer.model, lr=1e-3)
    assert found == {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in found}
    assert any("q_proj" in name for name in names) and any("dw1_proj" in name for name in names) == adapters


def test_rates_of_composition_need_an_optimizer_that_takes_them(tmp_path):
    with pytest.raises(DCFormerError, match=r"--optim adafactor: --compose_rates needs PyTorch's AdamW, .*adamw_torch"):
        prepare_pretraining([*RATES, "--compose_rates", "1", "--optim", "adafactor", "--output_dir", str(tmp_path)])


@pytest.mark.parametrize("rate", ["true", "0", "-1", "nan", "initially"])
def test_rates_of_composition_that_are_none(rate, tmp_path):
    with pytest.raises(DCFormerError, match=rf"--compose_rates {rate}: expected a number above 0, or 'initial'"):
        prepare_pretraining([*RATES, "--compose_rates", rate, "--output_dir", str(tmp_path)])


def test_pretraining_resumes_with_the_rates_of_composition(tmp_path):
    overrides = "{num_hidden_layers: 1, hidden_size: 64, head_dim: 4}"
    flags = ["--tokenizer", CHECKPOINT, "--config_overrides", overrides, "--data", TEXT, "--max_length", "64", *QUICK]
    flags += ["--max_steps", "4", "--save_steps", "2", "--output_dir", str(tmp_path), "--compose_rates"]
    pretrain.main([*flags, "initial"])
    whole = load_file(tmp_path / "model.safetensors")
    for path in (tmp_path / "checkpoint-4", tmp_path / "model.safetensors"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pretrain.main([*flags, "initial", "--resume_from_checkpoint", "last"])
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    with pytest.raises(SystemExit, match=r'compose_rates is "initial" in the checkpoint and "0\.1" now'):
        pretrain.main([*flags, "0.1", "--resume_from_checkpoint", "last"])


def tiny_model() -> DCFormerForCausalLM:
    torch.manual_seed(0)
    return DCFormerForCausalLM(tiny_config(vocab_size=288, pad_token_id=0, eos_token_id=3, initializer_range=0.1))


OPTIONS = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "learning_rate": 1e-2,
    "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 8,
}  # fmt: skip


def test_sft_trainer(tmp_path):
    data = Dataset.from_list([json.loads(line) for line in Path(TEXT).read_text().splitlines()])
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    args = SFTConfig(str(tmp_path), max_steps=8, **OPTIONS)
    trainer = SFTTrainer(tiny_model(), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert curve[-1] < curve[0] - 0.3


@pytest.mark.parametrize("adapters", [False, True], ids=["whole model", "adapters"])
def test_dpo_trainer(adapters, tmp_path):
    from peft import LoraConfig

    rows = [json.loads(line)["messages"] for line in Path(CHAT).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": "\n" + q["content"], "chosen": " " + a["content"], "rejected": " Monday"} for q, a, *_ in rows[:32]]
    )
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    args = DPOConfig(str(tmp_path), max_steps=8, beta=0.5, max_length=64, **OPTIONS)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LORA_TARGETS) if adapters else None
    reference = None if adapters else tiny_model()  # with adapters: the model without them
    trainer = DPOTrainer(
        tiny_model(), reference, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert curve[0] == pytest.approx(0.6931, abs=1e-3) and curve[-1] < 0.5


SCALED = ["--tokenizer", CHECKPOINT, "--data", TEXT, "--eval_rows", "4", "--recipe", "dcformer-405m"]
TINY = "{num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2, head_dim: 16, intermediate_size: 32}"


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("code", [False, True], ids=["without code", "with code"])
def test_trainers_that_load_the_reference_themselves(trainer_class, code, tmp_path):
    """They need a folder with remote code, as the page says, and run this package's."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    if code:
        export_remote_code(folder)
    config_class = GRPOConfig if trainer_class is GRPOTrainer else RLOOConfig
    options = OPTIONS | {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 2}
    args = config_class(str(tmp_path / "out"), max_steps=1, beta=0.1, **options)
    data = Dataset.from_list([{"prompt": "the fox"}] * 4)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = {"args": args, "train_dataset": data, "processing_class": tokenizer}

    def make():
        return trainer_class(model, lambda completions, **_: [float(len(text)) for text in completions], **given)

    if code:
        trainer = make()
        trainer.train()
        assert type(trainer.ref_model) is DCFormerForCausalLM
    else:
        with pytest.raises(AttributeError, match="auto_map"):
            make()


def test_recipes_are_applied(tmp_path):
    """Model, batch, steps and rates are the recipe's; what is given wins, on the command line and in a file."""
    quick = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(tmp_path / "out")]
    options = [*SCALED, *quick, "--config_overrides", TINY, "--scale", "0.01"]
    trainer, _ = prepare_pretraining([*options, "--devices", "1"])
    args, config = trainer.args, trainer.model.config
    assert (args.max_steps, args.learning_rate, args.get_warmup_steps(135)) == (135, 3e-4, 2)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 256
    assert (args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.95, 0.1, 1.0)
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (config.hidden_size, config.sliding_window, config.compose_rank) == (32, 256, 2)
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 0.01\nrecipe: transformer++-405m\n")
    options = [o for o in options if o not in ("--recipe", "dcformer-405m")]
    trainer, _ = prepare_pretraining([*options, "--config", str(file), "--max_steps", "3"])
    assert (trainer.args.max_steps, trainer.args.learning_rate) == (3, 0.01)
    assert not trainer.model.config.compose_generators and not trainer.model.config.qk_norm


CLASSES = (DataArguments, NewModelArguments, PretrainingConfig)
GIVEN = {
    "--max_steps 20 --scale 0.5": {"max_steps": 20, "warmup_steps": 0},
    "--max_steps 5000": {"max_steps": 5000, "warmup_steps": 0.01},
    "--max-steps=5000": {"max_steps": 5000, "warmup_steps": 0.01},
    "--max_st 5000": {"max_steps": 5000, "warmup_steps": 0.01},
    "--max_steps 20 --warmup_steps 3": {"max_steps": 20, "warmup_steps": 3},
    "--max_steps 20 --num_train_epochs 2": {"max_steps": 20, "num_train_epochs": 2, "warmup_steps": 0},
    "--num_train_epochs 1": {"max_steps": -1, "num_train_epochs": 1, "warmup_steps": 0.01},
    "--num_train_epochs 1 --warmup_steps 7": {"max_steps": -1, "num_train_epochs": 1, "warmup_steps": 7},
    "--max_steps -1": {"max_steps": -1, "num_train_epochs": 3, "warmup_steps": 0.01},
    "--lr_scheduler_type linear": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "max_steps": 13_500},
    "--lr_scheduler_type cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    '--lr_scheduler_kwargs {"min_lr":0.001}': {"lr_scheduler_kwargs": {"min_lr": 0.001}},
    "--gradient_accumulation_steps 2": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "--per_device_train_batch_size 4": {"gradient_accumulation_steps": 64, "per_device_train_batch_size": 4},
    "--weight_decay 0 --adam_beta2 0.99": {"weight_decay": 0, "adam_beta2": 0.99, "max_grad_norm": 1},
}


SPELLINGS = ("--max-steps=5000", "--max_st 5000")  # of the command line


@pytest.mark.parametrize(
    ("place", "options"),
    [
        (place, options)
        for place in ("line", "file")
        for options in GIVEN
        if place == "line" or options not in SPELLINGS
    ],
)
def test_what_is_given_besides_a_recipe_wins(options, place, tmp_path):
    words = options.replace("=", " ").split()
    if place == "file":
        file = tmp_path / "run.yaml"
        pairs = zip(words[::2], words[1::2], strict=True)
        file.write_text("".join(f"{name.lstrip('-')}: {value.replace(':', ': ')}\n" for name, value in pairs))
        words = ["--config", str(file)]
    line = [*SCALED, "--output_dir", str(tmp_path), "--use_cpu", *words]
    _, chosen, training = parse(CLASSES, line)
    _, _, training = parse(CLASSES, with_recipe(CLASSES, chosen, training, line))
    assert training.learning_rate == 3e-4
    expected = GIVEN[options]
    assert {name: getattr(training, name) for name in expected} == expected


@pytest.mark.parametrize("processes", [(4, 1), (1, 4)], ids=["four processes", "four GPUs of one"])
def test_devices_of_a_recipe_are_those_of_the_run(processes, tmp_path, monkeypatch, caplog):
    """Others are taken at their word, with a warning."""
    hear(monkeypatch, training_arguments.logger)
    for name, count in zip(("world_size", "n_gpu"), processes, strict=True):
        monkeypatch.setattr(PretrainingConfig, name, property(lambda _, count=count: count))
    line = [*SCALED, "--output_dir", str(tmp_path), "--use_cpu"]
    for more in ([], ["--devices", "4"]):
        _, chosen, training = parse(CLASSES, [*line, *more])
        _, _, training = parse(CLASSES, with_recipe(CLASSES, chosen, training, [*line, *more]))
        assert 4 * training.per_device_train_batch_size * training.gradient_accumulation_steps == 256
    assert not caplog.records
    for devices, sequences in ((8, 128), (1, 1024)):  # as many sequences for each as with that number
        more = [*line, "--devices", str(devices)]
        _, chosen, training = parse(CLASSES, more)
        _, _, training = parse(CLASSES, with_recipe(CLASSES, chosen, training, more))
        assert devices * training.per_device_train_batch_size * training.gradient_accumulation_steps == 256
        assert f"--devices is {devices}, and this run has 4: a step takes {sequences} sequences" in caplog.text


@pytest.mark.parametrize("devices", ["4", "-3"])
def test_devices_and_an_accumulation_of_ones_own_are_refused(devices, tmp_path):
    line = [*SCALED, "--output_dir", str(tmp_path), "--use_cpu", "--devices", devices]
    line += ["--gradient_accumulation_steps", "2"]
    _, chosen, training = parse(CLASSES, line)
    with pytest.raises(DCFormerError, match=f"--devices {devices} decides the accumulation.* leave one of the two out"):
        with_recipe(CLASSES, chosen, training, line)


def test_other_schedules_need_no_arguments(tmp_path):
    """The minimum is of the schedule that takes it, with and without a recipe."""
    assert prepare(tmp_path, "--data", TEXT).args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    trainer = prepare(tmp_path, "--data", TEXT, "--lr_scheduler_type", "linear")
    trainer.create_optimizer_and_scheduler(10)
    rates = []
    for _ in range(10):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
    assert rates[0] == pytest.approx(3e-5) and rates[-1] == 0


def test_one_step_of_a_recipe(tmp_path):
    """The model of DCFormer-405M at two layers, a batch of one sequence."""
    small = ["--config_overrides", "{num_hidden_layers: 2}", "--scale", "1e-6", "--max_length", "32"]
    batch = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1", "--save_strategy", "no"]
    quick = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(tmp_path)]
    trainer, _ = prepare_pretraining([*SCALED, *small, *batch, *quick])
    before = trainer.model.model.layers[1].self_attn.compose.qkw.detach().clone()
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps == 1
    assert trainer.model.config.hidden_size == 1024
    assert not torch.equal(before, trainer.model.model.layers[1].self_attn.compose.qkw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "dcformer-7b"], "recipe 'dcformer-7b' is unknown"),
        (["--recipe", "dcformer-405m", "--devices", "6"], "use .* devices"),
        (["--recipe", "dcformer-405m", "--scale", "0"], "scale is 0"),
        (["--scale", "0.5"], "--scale and --devices are of a recipe"),
        (["--recipe", "dcformer-405m", "--devices", "0"], "devices is 0"),
        (["--recipe", "dcformer-405m", "--preset", "dcformer-405m"], "both name a model: give one of the two"),
    ],
)
def test_recipes_that_do_not_fit(options, message, tmp_path):
    base = ["--tokenizer", CHECKPOINT, "--data", TEXT, "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        pretrain.main([*base, *options])
    assert not (tmp_path / "out").exists()
