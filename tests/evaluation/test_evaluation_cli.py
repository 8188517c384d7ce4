"""``dcformer-eval``: errors before any work, tasks found, options kept, documented commands, two processes."""

import copy
import functools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from helpers import REPOSITORY, documented_commands, randomize, tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    GPTJConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerForSequenceClassification
from dcformer.evaluation import TASKS_FOLDER, heldout_items, main
from dcformer.modules import convert_attention
from dcformer.synthetic.__main__ import main as synthetic

sys.path.insert(0, str(REPOSITORY / "examples"))
import demo

MODEL = ["--model", "hf", "--model_args", "pretrained=checkpoints/dcformer-synthetic,backend=causal"]


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder in which the bundled checkpoint has the path that it has in the repository."""
    (tmp_path / "checkpoints").symlink_to(REPOSITORY / "checkpoints")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_model(lm_eval, monkeypatch):
    """Loading a model fails the test."""
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(HFLM, "__init__", lambda *_, **__: pytest.fail("the model is loaded"))


def scores(folder):
    """The results that ``--output_path`` holds."""
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_without_lm_eval(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main([*MODEL, "--tasks", "dcformer_synthetic_heldout"]) == 1
    assert "error: dcformer-eval needs lm-eval" in (message := capsys.readouterr().err)
    assert 'pip install "dcformer[eval]"' in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([], "need its file: --metadata dcformer_synthetic_file="),
        (["--metadata", "dcformer_synthetic_file=absent.jsonl"], "absent.jsonl: expected a file"),
        (["--metadata", '{"dcformer_synthetic_file": "wrong.jsonl"}'], "line 2: expected a JSON object"),
        (["--config", "config.yaml"], "absent.jsonl: expected a file"),
    ],
    ids=["none", "missing", "wrong", "in --config"],
)
@pytest.mark.parametrize("task", ["dcformer_synthetic", "piqa,dcformer_synthetic_3shot", "dcformer_*"])
def test_bad_data_file(work, no_model, capsys, task, metadata, message):
    (work / "wrong.jsonl").write_text('{"task_id": "t", "texts": "\\na [ b ]\\n"}\n["task_id"]\n')
    (work / "config.yaml").write_text("metadata: {dcformer_synthetic_file: absent.jsonl}\n")
    assert main([*MODEL, "--tasks", task, *metadata]) == 1
    assert message in capsys.readouterr().err


def test_unknown_task(no_model, capsys):
    assert main([*MODEL, "--tasks", "dcformer_synthetic_heldout,dcformer_nothing"]) == 1
    message = capsys.readouterr().err
    assert "error: Tasks not found: dcformer_nothing" in message and "dcformer-eval ls tasks" in message


ANSWERS = ["--tasks", "dcformer_synthetic_heldout_answers", "--limit", "4"]
LLAMA = ["--model_args", "pretrained=llama"]  # of Transformers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no tasks: add --tasks"),
        (["--tasks", ""], "no tasks: add --tasks"),
        ([*ANSWERS, "--output_path", "file"], "--output_path file: no file can be written to the folder file"),
        ([*ANSWERS, "--output_path", "file/out"], "--output_path file/out: no file can be written"),
        ([*ANSWERS, "--output_path", "file/out.json"], "no file can be written to the folder file"),
        ([*ANSWERS, "--log_samples"], "Specify --output_path"),
        ([*ANSWERS, "--config", "absent.yaml"], "Config file not found"),
        ([*ANSWERS, "--batch_size", "many"], "--batch_size many: expected a number"),
        ([*ANSWERS, "--batch_size", "0"], "--batch_size 0: expected a number"),
        *(([*ANSWERS, "--limit", n], f"--limit {float(n)}: expected a number") for n in ("0", "-3", "nan", "inf")),
        ([*ANSWERS[:2], "--config", "few.yaml"], "--limit few: expected a number of items"),
        ([*ANSWERS, "--include_path", "absent"], "--include_path absent: expected a folder"),
        (["ls", "tasks", "--include_path", "absent"], "--include_path absent: expected a folder"),
        ([*ANSWERS, "--apply_chat_template"], "--apply_chat_template: the tokenizer of checkpoints/dcformer-synthetic"),
        ([*ANSWERS, "--model_args", "pretrained=absent"], "pretrained=absent: expected a folder"),
        ([*ANSWERS, "--model_args", "max_length=0"], "max_length=0: expected 1 to 512"),
        ([*ANSWERS, "--gen_kwargs", "max_gen_toks=512"], "max_gen_toks=512: expected 1 to 511"),
        ([*ANSWERS, "--apply_chat_template", *LLAMA], "--apply_chat_template: the tokenizer of llama has no chat"),
        ([*ANSWERS, *LLAMA, "max_length=long"], "max_length=long: expected 1 to 128"),
        ([*ANSWERS, *LLAMA, "max_length=9", "--gen_kwargs", "max_gen_toks=9"], "max_gen_toks=9: expected 1 to 8"),
        ([*ANSWERS, "--gen_kwargs", "use_cache=False"], "--gen_kwargs use_cache: lm-eval sets it itself"),
        ([*ANSWERS, "--model_args", "pretrained=small"], "has 412 tokens, the model a vocabulary of 97"),
        ([*ANSWERS, "--model_args", "pretrained=classifier"], "classifier lacks lm_head.weight: expected those of a"),
        ([*ANSWERS, "--model_args", "pretrained=fused"], "error: fused has trained mixtures of heads"),
        ([*ANSWERS, "--model_args", "dtype=bf17"], "dtype=bf17: expected auto, float32, bfloat16 or float16"),
        ([*ANSWERS, "--device", "foo"], "--device 'foo': Expected one of cpu"),
        ([*ANSWERS, "--device", "cuda:99"], "--device 'cuda:99': this"),
        ([*ANSWERS, "--model", "hg"], "Attempted to load model 'hg'"),
    ],
    ids=lambda value: " ".join(value).removeprefix(" ".join(ANSWERS)) if isinstance(value, list) else "",
)
def test_found_before_the_model_is_loaded(work, no_model, capsys, arguments, message):
    (work / "file").touch()
    (work / "few.yaml").write_text("limit: few\n")
    shutil.copytree(REPOSITORY / "checkpoints" / "dcformer-synthetic", work / "small")
    tiny_config().save_pretrained(work / "small")
    shutil.copytree(REPOSITORY / "checkpoints" / "dcformer-synthetic", work / "fused")
    (work / "fused" / "operators.safetensors").touch()
    LlamaConfig(vocab_size=412, max_position_embeddings=128).save_pretrained(work / "llama")
    AutoTokenizer.from_pretrained(work / "small").save_pretrained(work / "llama")
    tokenizer = AutoTokenizer.from_pretrained(work / "small")
    tokenizer.save_pretrained(work / "classifier")
    DCFormerForSequenceClassification(tiny_config(vocab_size=len(tokenizer))).save_pretrained(work / "classifier")
    assert main(arguments if arguments[:1] == ["ls"] else [*MODEL, *arguments]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}  # all of these names have aliases
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("config", "has_table"),
    [
        (LlamaConfig(**SIZES, intermediate_size=24, rope_parameters=DYNAMIC), False),
        (tiny_config(), False),
        (OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16), True),
        (GPTJConfig(**SIZES, rotary_dim=4), True),
        (BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24), True),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_texts_beyond_the_context(work, no_model, monkeypatch, capsys, config, has_table):
    """Where positions have no table, such texts may be what is to be evaluated."""
    config.update({"vocab_size": 412, "max_position_embeddings": 128})
    chosen = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    ids = torch.arange(129)[None]
    with pytest.raises((IndexError, RuntimeError), match="index") if has_table else nullcontext():
        chosen.from_config(config)(ids)
    config.save_pretrained(work / "model")
    AutoTokenizer.from_pretrained("checkpoints/dcformer-synthetic").save_pretrained(work / "model")
    arguments = ["--model", "hf", *ANSWERS, "--model_args", "pretrained=model,max_length=129"]
    if has_table:
        assert main(arguments) == 1
        assert "max_length=129: expected 1 to 128" in capsys.readouterr().err
        return
    if isinstance(config, DCFormerConfig):
        DCFormerForCausalLM(config).save_pretrained(work / "model")  # its parameters are looked for
    said = []
    monkeypatch.setattr(logging.getLogger("lm_eval"), "warning", said.append)
    with pytest.raises(pytest.fail.Exception, match="the model is loaded"):
        main(arguments)
    assert "--model_args max_length=129 is beyond 128, the model's max_position_embeddings" in said


@pytest.mark.parametrize(
    ("model_args", "message"),
    [("attn_implementation=sdpa", "cannot compose attention heads"), ("nonsense=1", "nonsense")],
)
def test_found_while_the_model_is_loaded(lm_eval, monkeypatch, capsys, model_args, message):
    monkeypatch.setattr(lm_eval.evaluator, "evaluate", lambda *_, **__: pytest.fail("items are evaluated"))
    assert main([*MODEL, "--model_args", model_args, *ANSWERS]) == 1
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.MULTILINE)


def test_a_damaged_weight_file_is_named(work, lm_eval, capsys):
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(REPOSITORY / "checkpoints" / "dcformer-synthetic", work / "damaged", ignore=ignored)
    (work / "damaged" / "pytorch_model.bin").write_bytes(b"noise")
    assert main([*MODEL, "--model_args", "pretrained=damaged", *ANSWERS]) == 1
    assert "error: --model_args pretrained=damaged: damaged/pytorch_model.bin is damaged" in capsys.readouterr().err


def test_errors_of_the_evaluation_keep_their_trace(lm_eval, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    def fail(*_, **__):
        raise ValueError("in the tenth batch")

    monkeypatch.setattr(HFLM, "loglikelihood", fail)
    with pytest.raises(ValueError, match="in the tenth batch"):
        main([*MODEL, *ANSWERS])


def test_wrong_option(lm_eval, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*MODEL, "--tusks", "x"])
    assert caught.value.code == 2 and "--tusks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--metadata", "{x"), ("--gen_kwargs", '{"a":'), ("--model_args", '{"pretrained":')]
)
def test_json_that_is_none_is_wrong_usage(lm_eval, capsys, option, value):
    for words in ([option, value], [f"{option}={value}"]):
        assert main([*MODEL, *ANSWERS, *words]) == 2
        assert f"error: argument {option}: Invalid JSON: {value}." in capsys.readouterr().err


# --- the command line is lm-eval's ------------------------------------------------------------------------------------


def test_options_are_those_of_lm_eval(lm_eval, monkeypatch, capsys):
    from lm_eval.__main__ import cli_evaluate

    helps = []
    for call in (lambda: main(["run", "--help"]), cli_evaluate):
        monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--help"])
        with pytest.raises(SystemExit):
            call()
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[1] and "--include_path" in helps[0]
    assert sys.argv == ["lm_eval", "run", "--help"]


@pytest.mark.parametrize("how", ["option", "config"])
def test_own_tasks_beside_the_shipped_ones(work, lm_eval, capsys, how):
    folder = work / "own"
    folder.mkdir()
    shipped = (TASKS_FOLDER / "dcformer_synthetic_heldout_choices.yaml").read_text()
    shipped = shipped.replace("include: _heldout.yaml", f"include: {TASKS_FOLDER / '_heldout.yaml'}")
    (folder / "own.yaml").write_text(shipped.replace("task: dcformer_synthetic_heldout_choices", "task: own_choices"))
    (work / "config.yaml").write_text(f"include_path: {folder}\n")
    given = ["--include_path", str(folder)] if how == "option" else ["--config", "config.yaml"]
    tasks = ["--tasks", "own_choices,dcformer_synthetic_heldout_choices", "--limit", "20", "--batch_size", "20"]
    assert main([*MODEL, *tasks, *given, "--output_path", "out"]) == 0
    results = scores(work / "out")
    assert results["own_choices"]["acc,none"] == results["dcformer_synthetic_heldout_choices"]["acc,none"]


def test_a_task_twice_is_refused(lm_eval, paper_file, capsys):
    tasks = ["--tasks", "dcformer_synthetic*", "--metadata", f"dcformer_synthetic_file={paper_file}"]
    assert main([*MODEL, *tasks]) == 1
    assert re.search(r"^error: .*dcformer_synthetic_2shot", capsys.readouterr().err, re.MULTILINE)


def test_validate_finds_the_shipped_tasks(lm_eval, capsys):
    assert main(["validate", "--tasks", "dcformer_synthetic,dcformer_paper_5shot"]) == 0
    assert "All tasks found" in capsys.readouterr().out


# --- documented commands ----------------------------------------------------------------------------------------------


COMMANDS = documented_commands(REPOSITORY / "docs" / "evaluation.md")
COMMANDS += [words for words in documented_commands(REPOSITORY / "docs" / "index.md") if words[0] == "dcformer-eval"]


def evaluations():
    """The arguments of those that evaluate; with ``accelerate`` too, whose processes a test below starts."""
    for words in COMMANDS:
        if words[0] == "dcformer-eval":
            yield words[1:]
        elif words[0] == "accelerate":
            yield words[words.index("dcformer.evaluation") + 1 :]


def test_every_documented_command_is_run_here():
    kinds = {words[0] for words in COMMANDS}
    assert kinds == {"pip", "python", "accelerate", "dcformer-eval"} and len(COMMANDS) >= 10
    assert [words for words in COMMANDS if words[0] == "pip"] == [["pip", "install", ".[eval]"]]
    assert all("-m dcformer.evaluation" in " ".join(words) for words in COMMANDS if words[0] == "accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("words", list(evaluations()), ids=lambda words: words[words.index("--tasks") + 1])
def test_documented_command(work, lm_eval, monkeypatch, capsys, words):
    (made,) = (words for words in COMMANDS if words[:2] == ["python", "-m"])
    assert made[:3] == ["python", "-m", "dcformer.synthetic"]
    synthetic([*made[3:], "--contexts-per-task", "1"])
    arguments = [*words, "--limit", "4"]
    if "path/to/" in " ".join(words):  # a model and data that are not here: up to where they are needed
        (work / "path" / "to").mkdir(parents=True)
        (work / "path" / "to" / "DCFormer-2.8B").symlink_to(REPOSITORY / "checkpoints" / "dcformer-synthetic")
        calls = []
        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **options: calls.append(options))
        assert main(arguments) == 0
        assert calls[0]["tasks"] == [words[words.index("--tasks") + 1]] and calls[0]["model"] == "hf"
        return
    if "--output_path" not in arguments:
        arguments += ["--output_path", "out"]
    assert main(arguments) == 0
    results = scores(work)
    named = words[words.index("--tasks") + 1].split(",")
    assert set(named) <= set(results)
    printed = capsys.readouterr().out
    assert all(re.search(rf"^\|{task} *\|", printed, re.MULTILINE) for task in named)


def test_command_prints_the_demonstrations_accuracy(work, lm_eval, capsys):
    """The command of docs/index.md, whole: the figure of `make demo`, which the documentation shows too."""
    (words,) = (words for words in documented_commands(REPOSITORY / "docs" / "index.md") if words[0] == "dcformer-eval")
    assert main(words[1:]) == 0
    line = re.search(r"\|dcformer_synthetic_heldout *\|.*", capsys.readouterr().out)[0]
    accuracy = demo.main(["--show", "0"])
    assert f"exact_match|↑|{accuracy:.4f}|" in line.replace(" ", "")
    page = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert f"{accuracy:.4f} is {round(accuracy * 296)} of 296" in page


@pytest.mark.slow
def test_a_task_of_ones_own(work, lm_eval):
    """The page's, of two texts: the bits that the model needs for all of their bytes."""
    page = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (work / "tasks").mkdir()
    (work / "tasks" / "own_texts.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    lines = (REPOSITORY / "examples" / "data" / "text_test.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    (work / "held_out.jsonl").write_text("\n".join(lines))
    assert main([*MODEL, "--include_path", "tasks", "--tasks", "own_texts", "--output_path", "out"]) == 0
    folder, texts = "checkpoints/dcformer-synthetic", [json.loads(line)["text"] for line in lines]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
        nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert scores(work)["own_texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


# --- processes --------------------------------------------------------------------------------------------------------


def start(words):
    """Runs a command with this Python's programs, one thread a process and no GPU."""
    bin_folder = os.path.dirname(sys.executable)
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.long
def test_module(work, lm_eval):
    """Refused before lm-eval reads its tasks, which takes longer than all else."""
    done = start([sys.executable, "-m", "dcformer.evaluation", *MODEL, "--tasks", "dcformer_nothing", "--limit", "0"])
    assert done.returncode == 1 and "error: --limit 0.0: expected a number of items" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_score_as_one(work, lm_eval):
    """The documented command on all request types; an odd number of items, so that one process has one more."""
    (words,) = (words for words in COMMANDS if words[0] == "accelerate" and "--multi_gpu" in words)
    tasks = ",".join(f"dcformer_synthetic_heldout{suffix}" for suffix in ("", "_answers", "_choices", "_text"))
    words = [*words, "--tasks", tasks, "--limit", "61", "--log_samples"]
    words[words.index("launch") + 1 : words.index("launch") + 1] = ["--main_process_port", "0"]
    two = start([*words, "--output_path", "two"])
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("|dcformer_synthetic_heldout_answers|") == 1  # one process prints
    assert "Building contexts for dcformer_synthetic_heldout on rank 1" in two.stdout + two.stderr
    assert main([*words[words.index("dcformer.evaluation") + 1 :], "--output_path", "one"]) == 0
    one, two = scores(work / "one"), scores(work / "two")
    assert set(one) == set(two) and len(one) == 4
    for task, results in one.items():
        for metric, value in results.items():
            if isinstance(value, float) and "stderr" not in metric:
                # the batches differ: float32 rounding in perplexities, none in counts
                rel = 0 if metric.split(",")[0] in ("acc", "exact_match") else 1e-5
                assert two[task][metric] == pytest.approx(value, rel=rel, abs=1e-12), (task, metric)
    for task in one:
        ids = []
        for folder in ("one", "two"):
            (path,) = (work / folder).rglob(f"samples_{task}_2*.jsonl")
            ids.append(sorted(json.loads(line)["doc_id"] for line in path.read_text().splitlines()))
        assert ids[0] == ids[1] == list(range(61))  # each item once


def test_shares_follow_the_processes(lm_eval, monkeypatch):
    """Rank and number of processes where accelerate has several; `hf` itself stays lm-eval's."""
    from types import SimpleNamespace

    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from dcformer.evaluation.sharing import NAME, SharingHFLM

    def initialize(self, processes):
        self._rank, self._world_size, self._config = 0, 1, LlamaConfig()
        if processes > 1:
            self.accelerator = SimpleNamespace(process_index=1, num_processes=processes)

    monkeypatch.setattr(HFLM, "__init__", initialize)
    assert get_model(NAME) is SharingHFLM and get_model("hf") is HFLM
    for processes, shares in ((1, (0, 1)), (2, (1, 2))):
        model = SharingHFLM(processes)
        assert (model.rank, model.world_size) == shares


@pytest.mark.parametrize(("processes", "model"), [("1", "hf"), ("2", "dcformer-hf")])
def test_the_model_of_several_processes(lm_eval, monkeypatch, processes, model):
    calls = []
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **options: calls.append(options["model"]))
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main([*MODEL, *ANSWERS]) == 0
    assert calls == [model]


def test_converted_models_are_evaluated_with_their_composition(work, lm_eval):
    """The library's own class would leave it out, with a warning, and the score would be the plain model's."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = AutoTokenizer.from_pretrained("checkpoints/dcformer-synthetic")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=128, initializer_range=0.2, **sizes))
    model.save_pretrained(work / "plain")
    convert_attention(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compose." in name:
                parameter.normal_()
    model.save_pretrained(work / "composed")
    found = {}
    for name in ("plain", "composed"):
        tokenizer.save_pretrained(work / name)
        arguments = ["--model", "hf", "--model_args", f"pretrained={name}", *ANSWERS, "--output_path", f"{name}_out"]
        assert main(arguments) == 0
        found[name] = scores(work / f"{name}_out")
    task = "dcformer_synthetic_heldout_answers"
    model_here = HFLM(pretrained=model.eval(), tokenizer=tokenizer)
    manager = TaskManager(include_path=str(TASKS_FOLDER))
    expected = lm_eval.simple_evaluate(model_here, tasks=[task], limit=4, task_manager=manager)["results"][task]
    perplexity = "perplexity,none"
    assert found["composed"][task][perplexity] == pytest.approx(expected[perplexity], rel=1e-4)
    assert found["plain"][task][perplexity] != pytest.approx(expected[perplexity], rel=0.1)


def test_converted_encoder_decoders_keep_the_class_that_lm_eval_chooses(work, lm_eval):
    from dcformer.evaluation.sharing import SharingHFLM

    tokenizer = AutoTokenizer.from_pretrained("checkpoints/dcformer-synthetic")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=512, decoder_start_token_id=0))
    randomize(convert_attention(model, compose_key="uncached")).save_pretrained(work / "t5")
    loaded = SharingHFLM(pretrained="t5", tokenizer=tokenizer, device="cpu", dtype="float32")
    assert loaded.AUTO_MODEL_CLASS is AutoModelForSeq2SeqLM and type(loaded.model) is T5ForConditionalGeneration
    states = loaded.model.state_dict()
    assert all(torch.equal(states[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("compose_key", [True, "uncached"])
@pytest.mark.parametrize("given", ["folder", "model", "compiled", "wrapped"])
def test_models_that_no_cache_has_room_for_generate_without(compose_key, given, work, lm_eval):
    """lm-eval asks for a cache, in which composition weights of keys would be missing at the second token."""
    from dcformer.evaluation.sharing import SharingHFLM

    tokenizer = AutoTokenizer.from_pretrained("checkpoints/dcformer-synthetic")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
    randomize(convert_attention(model.eval(), compose_key=compose_key)).save_pretrained(work / "model")
    ids, used = torch.arange(4, 9)[None], []
    expected = model.generate(ids, max_length=8, use_cache=False, do_sample=False)
    source = {"folder": "model", "model": model, "compiled": torch.compile(model, backend="eager")}.get(given, model)
    if given == "wrapped":
        model.generate = functools.partial(model.generate)
    loaded = SharingHFLM(pretrained=source, tokenizer=tokenizer, device="cpu", dtype="float32")
    loaded.model.model.register_forward_pre_hook(
        lambda _, __, kwargs: used.append(kwargs["use_cache"]), with_kwargs=True
    )
    assert torch.equal(loaded._model_generate(ids, max_length=8, stop=[]), expected)
    assert used == [compose_key == "uncached"] * 3
    if given != "folder":
        assert torch.equal(model.generate(ids, max_length=8, use_cache=False, do_sample=False), expected)
    other = copy.deepcopy(loaded.model)  # generates with its own parameters
    other.lm_head.weight.data.zero_()
    assert not torch.equal(other.generate(ids, max_length=8, do_sample=False), expected)


def test_items_have_several_answers():
    assert len(set(heldout_items()["test"]["answer"])) > 50
