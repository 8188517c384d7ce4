"""Folders for the Hub load back, and their card says what the configuration and lm-eval's results say."""

import json
import re
import shlex
import shutil

import pytest
import torch
from helpers import FIXTURES, REPOSITORY, randomize, tiny_config
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerForSequenceClassification, DCFormerModel, DHAConfig
from dcformer.analysis import compose_overhead
from dcformer.cache_report import cache_bytes_per_token
from dcformer.head_systems import HEAD_SYSTEMS, HeadSystemsConfig, to_head_system
from dcformer.publish import main, model_card, read_results
from dcformer.vision import DCViTConfig

CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"
# As lm-eval 0.4.13 writes it, less what the card does not read; tests/evaluation/test_evaluation_card.py has it write.
RESULTS = {
    "model_name": str(CHECKPOINT),
    "results": {
        "answers": {
            "alias": "answers",
            "acc,none": 0.375,
            "acc_stderr,none": 0.08,
            "perplexity,none": 4.5,
            "perplexity_stderr,none": "N/A",
            "sample_len": 37,
        },
        "group": {"alias": "group", "acc,none": 0.25, "acc_stderr,none": "N/A"},
    },
    "n-shot": {"answers": 5},
    "higher_is_better": {"answers": {"acc": True, "perplexity": False}},
    "n-samples": {"answers": {"original": 296, "effective": 296}},
}


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS))
    return path


def command_of_the_page() -> list[str]:
    page = (REPOSITORY / "docs" / "export.md").read_text(encoding="utf-8")
    command = re.search(r"^python -m dcformer\.publish(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return shlex.split(command[1].replace("\\\n", " "))


def test_command_of_the_page(tmp_path, results, capsys):
    arguments = command_of_the_page()
    source, target = arguments[:2]
    output = tmp_path / "hub"
    replaced = {source: str(REPOSITORY / source), target: str(output), "runs/results.json": str(results)}
    assert main([replaced.get(argument, argument) for argument in arguments]) == 0
    assert "model.safetensors.index.json" in capsys.readouterr().out

    index = json.loads((output / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(shards) > 1 and set(index["weight_map"].values()) == set(shards)
    assert all((output / shard).stat().st_size < 1.05e6 for shard in shards)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (CHECKPOINT, output))
    assert after.config.to_dict() | {"_name_or_path": ""} == before.config.to_dict() | {"_name_or_path": ""}
    state = after.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.state_dict().items())
    assert after.generation_config.eos_token_id == before.generation_config.eos_token_id
    text = "\nBoris owns the tuna."
    assert AutoTokenizer.from_pretrained(output)(text) == AutoTokenizer.from_pretrained(CHECKPOINT)(text)

    card = ModelCard.load(output / "README.md")
    assert card.data.license == "mit" and card.data.library_name == "transformers"
    assert card.data.model_name == "dcformer-synthetic"
    assert {(e.dataset_type, e.metric_type): e.metric_value for e in card.data.eval_results} == {
        ("answers", "acc"): 0.375,
        ("answers", "perplexity"): 4.5,
        ("group", "acc"): 0.25,
    }


@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "GPT2Tokenizer"}])
def test_remote_code_and_no_tokenizer(settings, tmp_path, capsys):
    """Without a vocabulary, of which the library would make an empty tokenizer, there is none either."""
    model = randomize(DCFormerForCausalLM(tiny_config(dtype="bfloat16")).bfloat16())
    model.save_pretrained(tmp_path / "model")
    if settings is not None:
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main([str(tmp_path / "model"), str(tmp_path / "hub"), "--remote_code"]) == 0
    assert "no tokenizer is saved" in capsys.readouterr().err
    assert not list((tmp_path / "hub").glob("tokenizer*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", trust_remote_code=True)
    assert loaded.dtype == torch.bfloat16
    assert (tmp_path / "hub" / "modeling_dcformer.py").is_file()
    assert "trust_remote_code=True" in (tmp_path / "hub" / "README.md").read_text()


@pytest.mark.parametrize("options", [(), ("--remote_code",)], ids=" ".join)
def test_head_systems_of_ones_own_are_refused(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setitem(HEAD_SYSTEMS, "own", type("Own", (HEAD_SYSTEMS["plain"],), {"__module__": "my_systems"}))
    to_head_system(DCFormerForCausalLM(tiny_config()), "own").save_pretrained(tmp_path / "model")
    assert main([str(tmp_path / "model"), str(tmp_path / "hub"), *options]) == 1
    assert "model has head_system='own', which is my_systems.Own and no part of this package" in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("stored", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_values_are_kept_whatever_dtype_the_configuration_names(tmp_path, stored):
    model = randomize(DCFormerForCausalLM(tiny_config()))
    model.save_pretrained(tmp_path / "model")
    file, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    tensors = {name: tensor.to(stored[i % 2]) for i, (name, tensor) in enumerate(load_file(file).items())}
    others = {"model.rotary_emb.inv_freq": torch.ones(2, dtype=torch.float64)}  # is not loaded
    save_file(tensors | others, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    assert main([str(tmp_path / "model"), str(tmp_path / "hub")]) == 0
    written = load_file(tmp_path / "hub" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor.float()) for name, tensor in tensors.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hub").dtype == torch.float32


def test_a_folder_in_the_authors_format(tmp_path, capsys):
    """Its parameters are float32, whatever it says; identities of projections that it does not have do not count."""
    shutil.copytree(FIXTURES / "B1", tmp_path / "model")
    file, config = tmp_path / "model" / "pytorch_model.bin", tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "float16"}))
    assert main([str(tmp_path / "model"), str(tmp_path / "hub")]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "hub" / "model.safetensors").values()} == {torch.float32}
    tensors = torch.load(file)
    torch.save({name: t if name.endswith("_proj.w") else t.half() for name, t in tensors.items()}, file)
    assert main([str(tmp_path / "model"), str(tmp_path / "half")]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
    torch.save({name: t if name.endswith(".scale") else t.half() for name, t in tensors.items()}, file)
    assert main([str(tmp_path / "model"), str(tmp_path / "mixed")]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "mixed" / "model.safetensors").values()} == {torch.float32}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_qk_norm": False}))
    assert main([str(tmp_path / "model"), str(tmp_path / "other")]) == 1
    assert "8 tensors that its configuration has no place for" in capsys.readouterr().err


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> other cells of every table row of a card."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: others for first, *others in cells}


@pytest.mark.parametrize("overrides", [{}, {"compose_key": False, "compose_rank": 1}, {"compose_static": True}])
def test_numbers_are_those_of_the_model(overrides):
    config = tiny_config(**overrides)
    model = DCFormerForCausalLM(config)
    table = rows(model_card(config, "user/tiny").text)
    assert table["Parameters"] == [f"{sum(p.numel() for p in model.parameters()):,}"]
    composed = sum(p.numel() for name, p in model.named_parameters() if ".compose." in name)
    overhead = compose_overhead(config)
    ratio = f"{overhead.parameter_ratio:.2%}"
    assert table["Parameters (outside the embeddings)"] == [f"{composed:,}", ratio]
    flops = table["FLOPs of the forward pass, per token at 128 tokens"]
    assert flops == [f"{overhead.flops_per_token:,}", f"{overhead.flops_ratio:.2%}"]
    plain, full = cache_bytes_per_token(config, torch.int8)
    assert table["Cache, numbers per token"] == [f"{full - plain:,}", f"{full / plain - 1:.2%}"]
    assert table["Layers"] == ["2 (1 local with a window of 8, 1 global)"]
    assert table["`compose_rank`"] == [str(config.compose_rank)] and table["Context"] == ["128"]


def test_evaluation_table(results):
    text = model_card(tiny_config(), "tiny", read_results(results)).text
    assert "| answers | 5 | acc ↑ | none | 0.3750 | 0.0800 | 296 |" in text
    assert "| answers | 5 | perplexity ↓ | none | 4.5000 |  | 296 |" in text
    assert "| group |  | acc | none | 0.2500 |  |  |" in text


@pytest.mark.parametrize("system", ["collaborative", "overlapped"])
def test_card_of_a_head_system(system):
    config = HeadSystemsConfig(**tiny_config(num_key_value_heads=4).to_dict(), head_system=system)
    text = model_card(config, "user/name").content
    model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    embeddings = model.get_input_embeddings().weight.numel() + model.get_output_embeddings().weight.numel()
    assert f"| Parameters | {count:,} |" in text and f"| ... outside the embeddings | {count - embeddings:,} |" in text
    assert f"| Head system | {system} |" in text
    cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert f"| Cache, numbers per token | {held:,} |" in text and text.count("Cache, numbers") == 1


PLAIN = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}
HALF = [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize(
    ("config", "said", "sources"),
    [
        (tiny_config(), ["dynamically composable"], ["2405.08553"]),
        (tiny_config(**PLAIN), ["heads are not composed"], []),
        (
            tiny_config(**PLAIN | {"compose_static": True, "compose_pre": True}),
            ["talking heads, composed by static projections alone"],
            ["2003.02436"],
        ),
        (DHAConfig(**tiny_config(**PLAIN).to_dict() | {"key_head_map": HALF}), ["decoupled-head"], ["2406.06567"]),
        (
            tiny_config(value_head_map=HALF),
            ["dynamically composable", " and decoupled-head attention"],
            ["2405.08553", "2406.06567"],
        ),
        (tiny_config(**PLAIN, head_embeddings="add", num_key_value_heads=1), ["head embeddings"], ["2310.07911"]),
        (
            HeadSystemsConfig(**tiny_config(**PLAIN, num_key_value_heads=4).to_dict(), head_system="overlapped"),
            ["with the head system `overlapped`."],
            [],
        ),
    ],
    ids=["composed", "plain", "static", "dha", "dha, composed", "mhe", "head system"],
)
def test_a_card_speaks_of_composition_only_if_there_is_any(config, said, sources):
    card = model_card(config, "user/name")
    first = card.text.split("## Use")[0]
    assert all(text in first for text in said)
    assert [tag for tag in card.data.tags if tag.startswith("arxiv:")] == [f"arxiv:{number}" for number in sources]
    assert ("dcmha" in card.data.tags) == bool(config.compose_generators) == ("dynamically" in first)
    titles = re.findall("^## (.*)", card.text, re.MULTILINE)
    composition = ["Composition", "What composition adds"] if config.composes else []
    assert titles == ["Use", "Sizes", *composition, "Evaluation", "Training", "License"]
    assert ("compos" in card.text.replace("heads are not composed", "")) == config.composes


def test_results_of_another_model(tmp_path, capsys, monkeypatch):
    """The model may be named as a folder, however it is written, or as `--name` says."""
    monkeypatch.chdir(REPOSITORY)
    results, output = tmp_path / "results.json", tmp_path / "hub"
    arguments = ["checkpoints/dcformer-synthetic", str(output), "--name", "user/tiny", "--results", str(results)]
    results.write_text(json.dumps(RESULTS | {"model_name": "other/model"}))
    assert main(arguments) == 1
    expected = "expected those of checkpoints/dcformer-synthetic or user/tiny: give this model's"
    message = capsys.readouterr().err
    assert f"{results} has the scores of other/model, {expected}" in message and message.count("\n") == 1
    assert not output.exists()
    for name in ("user/tiny", f"{CHECKPOINT}/", "checkpoints/../checkpoints/dcformer-synthetic"):
        results.write_text(json.dumps(RESULTS | {"model_name": name}))
        assert read_results(results, [arguments[0], "user/tiny"])


def test_card_without_results_and_license_says_so():
    card = model_card(tiny_config(), "tiny")
    assert "None yet" in card.text and "Not stated" in card.text
    assert card.data.license is None and card.data.eval_results is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'no object "results"'),
        ('{"results": {"task": 1}}', 'no object "results"'),
        ('{"results": {"task": {"alias": "task"}}}', "holds no scores"),
        (None, "cannot be read"),
    ],
)
def test_bad_results(tmp_path, capsys, content, message):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert main([str(CHECKPOINT), str(tmp_path / "hub"), "--results", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and str(path) in error
    assert not (tmp_path / "hub").exists()


def test_bad_models_outputs_and_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def error(model, *arguments) -> str:
        assert main([str(model), *map(str, arguments)]) == 1
        return capsys.readouterr().err

    LlamaConfig().save_pretrained(tmp_path / "llama")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config-only").mkdir()
    tiny_config().save_pretrained(tmp_path / "config-only")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    (tmp_path / "file").touch()
    output = tmp_path / "hub"
    absent = error(tmp_path / "absent", output)
    assert "no readable configuration (no such file or folder, and not found on the Hub by that name" in absent
    assert "no readable configuration" in error(tmp_path / "empty", output)
    assert "type 'llama': expected a causal language model of this package" in error(tmp_path / "llama", output)
    with monkeypatch.context() as patch:
        patch.setattr(DCFormerConfig, "__module__", "my_variants")  # as of a class that others derive
        assert "type 'dcformer': expected a causal language" in error(tmp_path / "config-only", output)
    DCViTConfig().save_pretrained(tmp_path / "vision")
    message = error(tmp_path / "vision", output)
    assert "type 'dcvit': expected a causal" in message and "save_pretrained(folder, max_shard_size=...)" in message
    assert "cannot be loaded" in error(tmp_path / "config-only", output)
    for kind in (DCFormerForSequenceClassification, DCFormerModel):
        kind(tiny_config()).save_pretrained(tmp_path / kind.__name__)
        assert f"{kind.__name__} lacks lm_head.weight: expected those of a" in error(tmp_path / kind.__name__, output)
    (tmp_path / "config-only" / "operators.safetensors").touch()
    assert "config-only has trained mixtures of heads" in error(tmp_path / "config-only", output)
    assert "exists and is not empty" in error(CHECKPOINT, tmp_path / "full")
    assert "exists and is not a folder" in error(CHECKPOINT, tmp_path / "file")
    message = error(CHECKPOINT, tmp_path / "file" / "hub")
    assert f"hub cannot be written: {tmp_path / 'file'} is a file, not a folder." in message
    assert "max_shard_size='many' is not understood" in error(CHECKPOINT, output, "--max_shard_size", "many")
    shutil.copytree(CHECKPOINT, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    assert f"error: the tokenizer of {tmp_path / 'damaged'} cannot be read" in error(tmp_path / "damaged", output)
    assert not output.exists() and (tmp_path / "full" / "kept").exists()
