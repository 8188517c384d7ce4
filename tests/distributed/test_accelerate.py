"""The configurations for `accelerate launch`, FSDP2 and DeepSpeed, on two processes; device maps."""

import importlib.util
import json

import pytest
import torch
import yaml
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DeepSpeedPlugin, DistributedType
from helpers import REPOSITORY, randomize, tiny_config
from packaging.version import Version
from safetensors.torch import load_file
from train_worker import CONFIG, MODELS
from transformers import AutoModelForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.planning import Setup, collectives, memory

CONFIGS = REPOSITORY / "examples" / "accelerate"
HERE = REPOSITORY / "tests" / "distributed"
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file"]
TWO_ON_CPU = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0", HERE / "on_cpu.py"]
FSDP2 = [*LAUNCH, CONFIGS / "fsdp2.yaml", *TWO_ON_CPU]


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
def test_fsdp2_losses_are_those_of_one_process(start, tmp_path, checkpointing):
    more = ["--checkpointing"] * checkpointing
    start(HERE / "train_worker.py", tmp_path / "one.json", "--batch", "4", *more)
    start(*FSDP2, HERE / "train_worker.py", tmp_path / "two.json", "--batch", "2", *more)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["fsdp2"] and not one["fsdp2"]
    assert len(one["history"]) == 6
    for ours, theirs in zip(two["history"], one["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert one["history"][0]["loss"] - one["history"][-1]["loss"] > 0.05
    # each process holds half of the parameters and of AdamW's two moments, up to rows that do not divide
    assert two["whole"] == one["whole"] == one["local"]
    assert two["local"] == pytest.approx(two["whole"] / 2, rel=0.01)
    assert two["state"] == 2 * two["local"] and one["state"] == 2 * one["local"]
    assert not one["counts"]
    if not checkpointing:
        check_plan(two)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "words", [["pruned heads"], ["images"], ["texts"], ["language", "--smoothing", "0.1"]], ids=" ".join
)
def test_fsdp2_trains_other_models_as_one_process(start, tmp_path, words):
    """Head systems with a loss of their own, images, classifiers, smoothed labels."""
    start(HERE / "train_worker.py", tmp_path / "one.json", "--batch", "4", "--model", *words)
    start(*FSDP2, HERE / "train_worker.py", tmp_path / "two.json", "--batch", "2", "--model", *words)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["fsdp2"] and len(one["history"]) == 6
    for ours, theirs in zip(two["history"], one["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("words", [[], ["--checkpointing"]], ids=" ".join)
def test_fsdp2_in_the_precision_of_the_file(start, tmp_path, words):
    """In bfloat16 FSDP2 casts what layers are called with, masks among it."""
    mixed = [word for word in FSDP2 if word not in ("--mixed_precision", "no")]
    start(HERE / "train_worker.py", tmp_path / "one.json", "--batch", "4", *words)
    start(*mixed, HERE / "train_worker.py", tmp_path / "two.json", "--batch", "2", *words)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["fsdp2"] and len(two["history"]) == 6
    losses = [[step["loss"] for step in run["history"]] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=0.02) and losses[1] != losses[0]  # half of bfloat16's 2^-8 of 5


def check_plan(two):
    """What `dcformer-plan` says of memory and communication, against a step of two processes."""
    setup = Setup(DCFormerConfig(**CONFIG), gpus=2, batch=2, length=21, dtype=torch.float32)
    parts, (gather, scatter) = memory(setup), collectives(setup)
    assert (parts.parameters, parts.optimizer) == (4 * two["local"], 4 * two["state"])
    assert two["counts"] == {"all_gather": gather.count, "reduce_scatter": scatter.count, "all_reduce": 1}  # its norms
    # an all-gather's numbers are counted whole, half of which a process sends; those of a reduce-scatter by its part
    assert gather.sent == pytest.approx(4 * two["numbers"]["all_gather"] / 2, rel=0.01)
    assert scatter.sent == pytest.approx(4 * two["numbers"]["reduce_scatter"], rel=0.01)


@pytest.mark.distributed
def test_the_examples_run_under_fsdp2(start, tmp_path, monkeypatch):
    """The page's command, shorter; then again from its first checkpoint: the folder holds an ordinary model."""
    training = pytest.importorskip("dcformer.training", exc_type=ImportError)
    check_example(start, training, tmp_path, monkeypatch, "## FSDP2", "pytorch_model_fsdp_0/*.distcp")


@pytest.mark.distributed
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="until torch 2.13 FSDP2 waits for modules that TRL's loss leaves out, and no step follows an evaluation",
)
def test_early_stopping_under_fsdp2(start, tmp_path):
    """All processes load the best model: the folder of its checkpoint is there before they look for it."""
    pytest.importorskip("dcformer.training", exc_type=ImportError)
    out = tmp_path / "out"
    options = {"output_dir": out, "max_steps": 4, "save_steps": 2, "early_stopping_patience": 1}
    options |= {"max_length": 128, "report_to": "none"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    config = ["--config", "examples/configs/pretrain_tiny.yaml", "--use_cpu"]
    assert f"wrote {out}" in start(*FSDP2, "examples/pretrain.py", *config, *words)
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(out / f"checkpoint-{state['best_global_step']}")


def check_example(start, training, tmp_path, monkeypatch, title, parts):
    """The command of a section of the page; `parts` are files of a checkpoint, one or more per process."""
    section = (REPOSITORY / "docs" / "scale_out.md").read_text(encoding="utf-8").partition(title)[2]
    command = section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ").split()
    assert command[:3] == ["accelerate", "launch", "--config_file"]
    script = command.index("examples/pretrain.py")
    out, again = tmp_path / "out", tmp_path / "again"
    options = {"output_dir": out, "max_steps": 3, "save_steps": 2, "logging_steps": 1, "report_to": "none"}
    options |= {"max_length": 128, "per_device_eval_batch_size": 1}

    def run(**more):
        words = [word for name, value in (options | more).items() for word in (f"--{name}", value)]
        return start("-m", "accelerate.commands.launch", *command[2:script], *TWO_ON_CPU, *command[script:], *words)

    assert f"wrote {out}" in run()
    assert len(list(out.glob(f"checkpoint-2/{parts}"))) == 2
    scored = json.loads((out / "eval_results.json").read_text())["eval_loss"]
    # weights, configuration and tokenizer of the folder, in one process
    words = ["--model_name_or_path", out, "--output_dir", tmp_path / "one", "--report_to", "none", "--use_cpu"]
    words += ["--data", "examples/data/text_train.jsonl", "--eval_data", "examples/data/text_test.jsonl", "--packing"]
    words += ["--max_length", "128", "--per_device_eval_batch_size", "1", "--disable_tqdm", "true"]
    monkeypatch.chdir(REPOSITORY)
    trainer, _ = training.prepare_finetuning(list(map(str, words)))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(scored, abs=1e-5)

    run(output_dir=again, resume_from_checkpoint=out / "checkpoint-2")
    whole, resumed = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert whole.keys() == resumed.keys() and all(whole[name].equal(resumed[name]) for name in whole)


def test_fsdp2_file():
    config = load_config_from_file(str(CONFIGS / "fsdp2.yaml"))
    assert isinstance(config, ClusterConfig) and config.distributed_type == DistributedType.FSDP
    assert config.fsdp_config["fsdp_version"] == 2
    assert "fsdp_transformer_layer_cls_to_wrap" not in config.fsdp_config  # accelerate takes the model's
    for model in (MODELS["language"](), MODELS["pruned heads"](), MODELS["images"]()):
        (name,) = model._no_split_modules
        assert {type(layer).__name__ for layer in model.base_model.layers} == {name}


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def test_deepspeed_files_load(monkeypatch):
    """What accelerate reads of them; it does so without DeepSpeed."""
    monkeypatch.chdir(REPOSITORY)
    config = load_config_from_file(str(CONFIGS / "deepspeed_zero3.yaml"))
    assert isinstance(config, ClusterConfig) and config.distributed_type == DistributedType.DEEPSPEED
    path = config.deepspeed_config["deepspeed_config_file"]
    plugin = DeepSpeedPlugin(hf_ds_config=path, zero3_init_flag=config.deepspeed_config["zero3_init_flag"])
    assert plugin.zero_stage == 3 and plugin.zero3_save_16bit_model and plugin.hf_ds_config.is_zero3()
    assert not plugin.hf_ds_config.is_offload()


def test_deepspeed_file_takes_the_trainers_values(monkeypatch, tmp_path):
    """Every "auto" is filled from TrainingArguments, and nothing contradicts them."""
    import accelerate.utils.deepspeed
    from transformers import TrainingArguments
    from transformers.integrations import deepspeed

    class Config(accelerate.utils.deepspeed.HfDeepSpeedConfig):
        """Transformers' class on accelerate's, as where DeepSpeed is installed."""

    for name, member in vars(deepspeed.HfTrainerDeepSpeedConfig).items():
        if not name.startswith("__"):
            setattr(Config, name, member)
    config = Config(json.loads((CONFIGS / "deepspeed_zero3.json").read_text()))
    config._dtype, config.mismatches = None, []
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_grad_norm=0.5, use_cpu=True)
    config.trainer_config_process(arguments)
    with init_empty_weights():
        model = DCFormerForCausalLM(DCFormerConfig.from_preset("dcformer-6.9b", num_hidden_layers=1))
    config.trainer_config_finalize(arguments, model, num_training_steps=10)
    assert config.get_value("train_micro_batch_size_per_gpu") == 4
    assert config.get_value("gradient_clipping") == 0.5
    assert config.get_value("zero_optimization.reduce_bucket_size") == 4096**2
    assert not config.mismatches and "auto" not in json.dumps(config.config)


@pytest.fixture(scope="module")
def deepspeed(start):
    """Stage, its own folder and arguments of Python -> their output, on two processes with DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: make test-deepspeed")

    def run(stage, folder, *arguments):
        """The shipped files with another stage, and no parameter too small to be in parts."""
        settings = json.loads((CONFIGS / "deepspeed_zero3.json").read_text())
        settings["zero_optimization"] |= {"stage": stage, "stage3_param_persistence_threshold": 0}
        launch = yaml.safe_load((CONFIGS / "deepspeed_zero3.yaml").read_text())
        launch["deepspeed_config"] = {
            "deepspeed_config_file": str(folder / "zero.json"),
            "zero3_init_flag": stage == 3,
        }
        (folder / "zero.json").write_text(json.dumps(settings))
        (folder / "zero.yaml").write_text(yaml.safe_dump(launch))
        return start(*LAUNCH, folder / "zero.yaml", *TWO_ON_CPU, *arguments)

    return run


ZERO = {
    "stage 3": (3, False, []),
    "stage 3, static projections": (3, True, []),
    "stage 3, gradient checkpointing": (3, False, ["--checkpointing"]),
    "stage 2": (2, False, []),
    "stage 3, bfloat16": (3, False, ["--bf16"]),
}


@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "static", "options"), ZERO.values(), ids=ZERO)
def test_deepspeed_trains_as_one_process(deepspeed, start, tmp_path, stage, static, options):
    """Losses, norms of gradients, evaluation, and what six steps of SGD change in each parameter."""
    torch.manual_seed(0)
    config = tiny_config(compose_static=static)
    before = randomize(AutoModelForCausalLM.from_config(config))
    before.save_pretrained(tmp_path / "model")
    worker = HERE / "deepspeed_worker.py"
    start(worker, tmp_path / "model", tmp_path / "one", "--batch", "4")  # in float32
    deepspeed(stage, tmp_path, worker, tmp_path / "model", tmp_path / "two", "--batch", "2", *options)
    one, two = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("one", "two"))
    assert (one["stage"], one["processes"]) == (None, 1) and (two["stage"], two["processes"]) == (stage, 2)
    # float32: rounding, 1e-7 of sums in another order, over six steps; bfloat16: weights and activations to 2^-8
    close = 2**-8 if "--bf16" in options else 1e-5
    assert len(one["history"]) == 6 and len(one["evaluated"]) == 2
    for ours, theirs in zip(two["history"], one["history"], strict=True):
        print(f"loss of one process {theirs['loss']:.7f}, of two {ours['loss']:.7f}")
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=close)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=4 * close)
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=close)

    # between steps no process holds a parameter under stage 3; under stage 2 each holds all
    assert two["held"].keys() == one["held"].keys()
    assert [held for held, _ in two["held"].values()] == [0 if stage == 3 else n for _, n in two["held"].values()]

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype="auto")
    if "--bf16" in options:  # these weights are rounded by more than the steps change them
        assert whole.dtype == torch.bfloat16
        return
    ours = dict(whole.named_parameters())
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype="auto").named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in before.named_parameters():
        change, expected = (after[name].detach() - parameter for after in (ours, theirs))
        rounding = 2 * 6 * 2**-24 * parameter.norm()  # of the parameter in six steps of two runs
        assert expected.norm() > 10 * rounding, name
        assert (change - expected).norm() <= 1e-4 * expected.norm() + rounding, name


@pytest.mark.distributed
def test_the_examples_run_under_deepspeed(deepspeed, start, tmp_path, monkeypatch):
    """The page's command, shorter; then again from its first checkpoint: the folder holds an ordinary model."""
    training = pytest.importorskip("dcformer.training", exc_type=ImportError)
    check_example(start, training, tmp_path, monkeypatch, "## DeepSpeed", "global_step2/*optim_states.pt")


# --- device maps ------------------------------------------------------------------------------------------------------


def test_device_map_auto(tmp_path):
    """Split over memory and disk, layers whole, with the same logits and tokens."""
    model = randomize(DCFormerForCausalLM(tiny_config(num_hidden_layers=4)))
    model.save_pretrained(tmp_path / "model")
    size = sum(p.nbytes for p in model.parameters())
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": int(size * 0.7)}, offload_folder=tmp_path / "offload"
    )
    places = split.hf_device_map
    assert set(places.values()) == {"cpu", "disk"}, places
    layers = {f"model.layers.{i}" for i in range(4)}
    assert not [name for name in places if name.startswith("model.layers.") and name not in layers]
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(split(ids).logits, model(ids).logits)
    generate = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(ids[:, :5], **generate), model.generate(ids[:, :5], **generate))


def test_device_map_of_two_gpus():
    """What `device_map="auto"` would do with a 6.9B model on two devices of 10 GB: layers whole, in order."""
    with init_empty_weights():
        model = DCFormerForCausalLM(DCFormerConfig.from_preset("dcformer-6.9b")).to(torch.bfloat16)
    places = infer_auto_device_map(
        model, max_memory={0: "10GB", 1: "10GB", "cpu": "10GB"}, no_split_module_classes=list(model._no_split_modules)
    )
    layers = [places[f"model.layers.{i}"] for i in range(32)]
    assert layers == sorted(layers) and set(layers) == {0, 1} and set(places.values()) == {0, 1}
