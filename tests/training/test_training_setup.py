"""A run goes on only with the setup of its checkpoint: whatever differs is said before training starts."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
from helpers import REPOSITORY, tiny_config

pytest.importorskip("trl")

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune
import pretrain
from trl import ModelConfig

from dcformer import DCFormerForCausalLM
from dcformer.errors import DCFormerError
from dcformer.training import DataArguments, ModelArguments, PretrainingConfig, TrainingConfig
from dcformer.training.resume import _FREE, check_setup, setup_of

COMMON = {
    "data": "examples/data/text_test.jsonl",
    "max_steps": "2",
    "save_steps": "2",
    "per_device_train_batch_size": "2",
    "learning_rate": "1e-3",
    "report_to": "none",
    "use_cpu": "true",
    "disable_tqdm": "true",
}
TUNE = COMMON | {"model_name_or_path": "checkpoints/dcformer-synthetic"}
OVERRIDES = "{num_hidden_layers: 2, hidden_size: 32, intermediate_size: 64, num_attention_heads: 4, head_dim: 8}"
NEW = COMMON | {"tokenizer": "checkpoints/dcformer-synthetic", "config_overrides": OVERRIDES, "max_length": "128"}
LORA = {"use_peft": "true", "lora_r": "4"}


def run(script, folder, **options):
    given = {name: value for name, value in options.items() if value is not None} | {"output_dir": str(folder)}
    return script.main([part for name, value in given.items() for part in (f"--{name}", value)])


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of three finished runs of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        run(finetune, folder / "tuned", **TUNE)
        run(finetune, folder / "adapted", **TUNE | LORA)
        run(pretrain, folder / "new", **NEW)
    return folder


@pytest.fixture
def resumes(runs, tmp_path, monkeypatch):
    """Copies one of the runs and goes on with it; training must not start."""

    def refuse(kind, changed):
        monkeypatch.setattr("trl.SFTTrainer.train", lambda *_, **__: pytest.fail("training started"))
        script, options = {"tuned": (finetune, TUNE), "adapted": (finetune, TUNE | LORA), "new": (pretrain, NEW)}[kind]
        shutil.copytree(runs / kind, tmp_path / "out")
        with pytest.raises(SystemExit) as caught:
            run(script, tmp_path / "out", **options | {"resume_from_checkpoint": "last"} | changed)
        message = str(caught.value)
        assert message.startswith(f"error: {tmp_path / 'out' / 'checkpoint-2'} is of another run: ")
        assert "\n" not in message
        return message

    return refuse


DIFFERENT = [
    ("tuned", LORA, "use_peft is false in the checkpoint and true now"),
    ("adapted", {"use_peft": None, "lora_r": None}, "use_peft is true in the checkpoint and false now"),
    ("adapted", {"lora_r": "8"}, "lora_r is 4 in the checkpoint and 8 now"),
    ("adapted", {"lora_dropout": "0.1"}, "lora_dropout is 0.0 in the checkpoint and 0.1 now"),
    ("tuned", {"learning_rate": "5e-4"}, "learning_rate is 0.001 in the checkpoint and 0.0005 now"),
    ("tuned", {"per_device_train_batch_size": "4"}, "per_device_train_batch_size is 2 in the checkpoint and 4 now"),
    ("tuned", {"gradient_accumulation_steps": "2"}, "gradient_accumulation_steps is 1 in the checkpoint and 2 now"),
    ("tuned", {"optim": "sgd"}, 'optim is "adamw_torch_fused" in the checkpoint and "sgd" now'),
    ("tuned", {"adam_beta2": "0.99"}, "adam_beta2 is 0.95 in the checkpoint and 0.99 now"),
    ("tuned", {"weight_decay": "0"}, "weight_decay is 0.1 in the checkpoint and 0.0 now"),
    ("tuned", {"max_grad_norm": "2"}, "max_grad_norm is 1.0 in the checkpoint and 2.0 now"),
    ("tuned", {"warmup_steps": "1"}, "warmup_steps is 0.01 in the checkpoint and 1"),
    ("tuned", {"seed": "1"}, "seed is 42 in the checkpoint and 1 now"),
    ("tuned", {"packing": "true"}, "packing is false in the checkpoint and true now"),
    ("tuned", {"max_length": "64"}, "max_length is null in the checkpoint and 64 now"),
    ("tuned", {"bf16": "true"}, "bf16 is false in the checkpoint and true now"),
    ("tuned", {"dtype": "bfloat16"}, 'dtype is "float32" in the checkpoint and "bfloat16" now'),
    ("tuned", {"eval_rows": "5"}, "eval_rows is 0 in the checkpoint and 5 now"),
    ("tuned", {"data": "examples/data/text_train.jsonl"}, 'and "examples/data/text_train.jsonl" now'),
    ("new", {"learning_rate": "5e-4"}, "learning_rate is 0.001 in the checkpoint and 0.0005 now"),
    ("new", {"preset": "dcpythia-2.8b"}, 'config.norm_type is "rmsnorm" in the checkpoint and "layernorm" now'),
    (
        "new",
        {"config_overrides": OVERRIDES.replace("layers: 2", "layers: 3")},
        "config.num_hidden_layers is 2 in the checkpoint and 3 now",
    ),
]


@pytest.mark.parametrize(("kind", "changed", "message"), DIFFERENT, ids=[f"{k} {c}" for k, c, _ in DIFFERENT])
def test_another_setup(resumes, kind, changed, message):
    assert message in resumes(kind, changed)


def test_all_that_differs(resumes):
    message = resumes("tuned", {"learning_rate": "5e-4", "seed": "1"})
    assert "learning_rate is 0.001 in the checkpoint and 0.0005 now; " in message and "seed is 42" in message


def test_another_model(resumes, tmp_path):
    folder = tmp_path / "model"
    DCFormerForCausalLM(tiny_config(vocab_size=288)).save_pretrained(folder)
    message = resumes("tuned", {"model_name_or_path": str(folder), "tokenizer": TUNE["model_name_or_path"]})
    assert f'model_name_or_path is "checkpoints/dcformer-synthetic" in the checkpoint and "{folder}" now' in message
    assert "config.hidden_size is 128 in the checkpoint and 32 now" in message


def test_what_may_change(runs, tmp_path, capsys):
    """The same model by another path, a longer run, other logs, folders and ways to compute."""
    changed = {
        "model_name_or_path": str(REPOSITORY / "checkpoints" / "dcformer-synthetic"),
        "resume_from_checkpoint": str(runs / "tuned" / "checkpoint-2"),
        "max_steps": "5",
        "save_steps": "4",
        "logging_steps": "1",
        "gradient_checkpointing": "true",
        "attn_implementation": "eager",
    }
    run(finetune, tmp_path / "longer", **TUNE | changed)
    assert (tmp_path / "longer" / "checkpoint-4").is_dir()
    run(finetune, tmp_path / "whole", **TUNE | {"max_steps": "5", "logging_steps": "1"})
    states = [json.loads((tmp_path / name / "trainer_state.json").read_text()) for name in ("longer", "whole")]
    assert states[0]["global_step"] == 5
    # The schedule, as docs/training.md has it: a step at the old rate, then the longer run's.
    rates = [{e["step"]: e["learning_rate"] for e in s["log_history"] if "learning_rate" in e} for s in states]
    assert rates[0].keys() == {3, 4, 5} and rates[0][3] == pytest.approx(1e-4)
    assert [rates[0][step] for step in (4, 5)] == pytest.approx([rates[1][step] for step in (4, 5)])


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"stateful_callbacks": []},
        {"stateful_callbacks": {"SetupRecord": []}},
        {"stateful_callbacks": {"SetupRecord": {"args": "x"}}},
        {"stateful_callbacks": {"SetupRecord": {"args": {"setup": []}}}},
    ],
    ids=str,
)
def test_a_damaged_record_is_none(state, tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(DCFormerError, match="holds no record of its setup"):
        check_setup(str(tmp_path), {})


def test_checkpoint_without_a_setup(runs, tmp_path):
    shutil.copytree(runs / "tuned", tmp_path / "out")
    file = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["SetupRecord"]
    file.write_text(json.dumps(state))
    with pytest.raises(SystemExit, match=r"^error: .*checkpoint-2 holds no record of its setup"):
        run(finetune, tmp_path / "out", **TUNE, resume_from_checkpoint="last")


@pytest.mark.parametrize("streaming", [False, True])
def test_processes_that_read_a_stream_are_fixed(streaming):
    """One process reads a stream's files one after another, several read them in turn: rows in another order."""

    def setup(workers):
        data = DataArguments(data="x", streaming=streaming)
        return setup_of(tiny_config(), 1, SimpleNamespace(dataloader_num_workers=workers), data)

    assert setup(0) == setup(1) and setup(2) == setup(2)
    assert (setup(2) != setup(1)) == (setup(2) != setup(3)) == streaming


def test_free_arguments_exist():
    """A name in the list that no library has (any more) lets nothing through that it should not."""
    classes = (DataArguments, ModelArguments, ModelConfig, TrainingConfig, PretrainingConfig)
    names = {name for kind in classes for name in kind.__dataclass_fields__}
    assert _FREE - {"preset", "recipe", "scale", "devices", "config_overrides"} <= names
