"""Folding folders: streamed as in memory, what goes along, memory, and what is refused."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import PLAIN, REPOSITORY, randomize, tiny_config
from safetensors.torch import load_file, save_file
from tiny_sources import MAKE, SIZES, llama, make, tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    GptOssConfig,
    LlamaForSequenceClassification,
    Olmo2Config,
    T5Config,
)

from dcformer import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCFormerModel,
    DHAConfig,
    DHAForCausalLM,
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
    dha,
)
from dcformer.dha import folding
from dcformer.dha.folding import fold_folder
from dcformer.dha.sources import find_family
from dcformer.errors import DCFormerError
from dcformer.modules import convert_attention

TOKENIZER = REPOSITORY / "checkpoints" / "dcformer-synthetic"


@pytest.mark.parametrize("name", MAKE)
def test_a_folded_folder_is_the_model_folded_in_memory(name, tmp_path):
    """From several shards; the search, too, needs no model, and both read the same."""
    model = make(name)
    model.generation_config.temperature = 0.25
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert len([*(tmp_path / "source").glob("*.safetensors")]) > 1
    plan = dha.search(tmp_path / "source", 0.5, allocation="root", progress=False)
    assert plan == dha.search(model, 0.5, allocation="root", progress=False)
    config = fold_folder(tmp_path / "source", plan, tmp_path / "folded", progress=False, max_shard_size=20_000)
    folded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = dha.from_plan(model, plan)
    assert type(folded) is type(expected) and folded.config.num_key_heads == plan.num_key_heads == config.num_key_heads
    assert torch.equal(folded.eval()(tokens()).logits, expected(tokens()).logits)
    assert folded.generation_config.temperature == 0.25
    with pytest.raises(
        ValueError,
        match=r"key_head_map gives the layers the usual heads, but the parameters in .*/folded are of \[\d, \d\] heads",
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "folded", key_head_map=None, value_head_map=None)
    for arguments in ({"config": str(tmp_path / "folded")}, {"config": tmp_path / "folded" / "config.json"}):
        assert type(folded).from_pretrained(tmp_path / "folded", **arguments).config.num_key_heads == plan.num_key_heads
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", num_hidden_layers=1)
    assert first.config.num_hidden_layers == len(first.model.layers) == 1
    for saved in (folded, expected):
        state = {name for name, _ in saved.named_parameters()}
        assert state == {name for name, _ in expected.named_parameters()}
    shapes = [layer.self_attn.k_proj.weight.shape[0] for layer in folded.model.layers]
    assert shapes == [heads * config.head_dim for heads in plan.num_key_heads]


def test_tokenizer_and_records_go_along(tmp_path):
    model = llama(vocab_size=len(AutoTokenizer.from_pretrained(TOKENIZER)))
    model.save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "source")
    plan = dha.uniform_plan(model, 0.25)
    fold_folder(tmp_path / "source", plan, tmp_path / "folded", facts={"given": 1}, progress=False)
    text = "Peter owns the desk."
    same = [AutoTokenizer.from_pretrained(tmp_path / which)(text)["input_ids"] for which in ("source", "folded")]
    assert same[0] == same[1]
    assert dha.HeadPlan.load(tmp_path / "folded" / "plan.json") == plan
    assert json.loads((tmp_path / "folded" / "dha.json").read_text()) == {"given": 1}


def test_a_folded_model_without_its_maps_does_not_load(tmp_path):
    model = make("llama")
    dha.from_plan(model, dha.search(model, 0.25, progress=False)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("key_head_map", "value_head_map"):
        config.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


MAPS = {
    "gap": [[0, 0, 0, 0, 2, 2, 2, 2]] * 2,
    "negative": [[0, 0, 0, 0, -1, -1, 1, 1]] * 2,
    "lengths": [[0] * 8, [0] * 7],
    "layers": [[0] * 8],
}


@pytest.mark.parametrize("wrong", MAPS)
def test_maps_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match="key_head_map"):
        DHAConfig(**SIZES, key_head_map=MAPS[wrong], value_head_map=[[0] * 8] * 2)


def test_nothing_is_left_of_a_fold_that_fails(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "source")
    plan = dha.uniform_plan(model, 0.5)
    state = load_file(tmp_path / "source" / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(state, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(DCFormerError, match=r"up_proj\.weight holds NaN"):
        fold_folder(tmp_path / "source", plan, tmp_path / "folded", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(DCFormerError, match="holds the checkpoint"):
        fold_folder(tmp_path / "source", plan, tmp_path / "source", overwrite=True, progress=False)
    (tmp_path / "folded").mkdir()
    (tmp_path / "folded" / "mine.txt").write_text("x")
    with pytest.raises(DCFormerError, match="not empty"):
        fold_folder(tmp_path / "source", plan, tmp_path / "folded", progress=False)


LAYER = "model.layers.1."
NEOX_LAYER = "gpt_neox.layers.1."
UNFIT = [
    *(
        ("llama", lambda state, name=name: state.pop(name), f"{name} is missing")
        for name in (
            LAYER + "self_attn.k_proj.weight",
            LAYER + "self_attn.q_proj.weight",
            LAYER + "mlp.down_proj.weight",
            LAYER + "input_layernorm.weight",
            "lm_head.weight",
        )
    ),
    (
        "llama",
        lambda state: shorten(state, LAYER + "self_attn.k_proj.weight"),
        r"is \[16, 32\], expected \[32, 32\]. Copy",
    ),
    ("llama", lambda state: shorten(state, LAYER + "mlp.up_proj.weight"), r"is \[24, 32\], expected \[48, 32\]"),
    ("llama", lambda state: state.update({"extra.weight": torch.zeros(2)}), "extra.weight has no place"),
    (
        "llama",
        lambda state: state.update({f"extra.{number}": torch.zeros(2) for number in range(8)}),
        r"7 others do not fit. Remove extra\.0, extra\.1, .*, extra\.5 and 2 more from its files",
    ),
    ("qwen2-bias", lambda state: state.pop(LAYER + "self_attn.v_proj.bias"), "v_proj.bias is missing"),
    ("neox-partial-rotary", lambda state: state.pop("embed_out.weight"), "lm_head.weight is missing"),
    (
        "neox-partial-rotary",
        lambda state: shorten(state, NEOX_LAYER + "attention.query_key_value.weight"),
        r"is \[48, 32\], expected \[96, 32\]",
    ),
    ("dcformer-composed", lambda state: state.pop(LAYER + "self_attn.o_proj.weight"), "o_proj.weight is missing"),
]


def shorten(state, name):
    state[name] = state[name][: len(state[name]) // 2].clone()


@pytest.mark.parametrize(("name", "change", "message"), UNFIT)
def test_tensors_that_do_not_fit_are_refused(name, change, message, tmp_path):
    """Otherwise they would be random in the folded model, or it could not be loaded."""
    model = make(name)
    plan = dha.search(model, 0.5, progress=False)
    save_changed(model, tmp_path / "source", change)
    for call in (
        lambda: fold_folder(tmp_path / "source", plan, tmp_path / "folded", progress=False),
        lambda: dha.search(tmp_path / "source", 0.5, progress=False),
        lambda: dha.from_plan(tmp_path / "source", plan),
    ):
        with pytest.raises(DCFormerError, match=f"do not fit its configuration: .*{message}"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_configuration_that_no_model_has_is_refused(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in ({"hidden_act": "nope"}, {"intermediate_size": -1}, {"num_hidden_layers": 1}):
        (tmp_path / "config.json").write_text(json.dumps(config | field))
        with pytest.raises(DCFormerError, match=tmp_path.name):
            dha.search(tmp_path, 0.5, progress=False)
    (tmp_path / "config.json").write_text("null")
    with pytest.raises(DCFormerError, match=r"config\.json is damaged \(it holds a NoneType, expected an object\)"):
        dha.search(tmp_path, 0.5, progress=False)


def save_changed(model, folder, change):
    """The model in a folder, with a change of its tensors."""
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama", {LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(2)}),
        ("llama-gqa-bias-tied", {"lm_head.weight": torch.zeros(61, 32)}),
        (
            "neox-partial-rotary",
            {NEOX_LAYER + "attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
             NEOX_LAYER + "attention.masked_bias": torch.tensor(-1e9),
             NEOX_LAYER + "attention.rotary_emb.inv_freq": torch.ones(2)},
        ),
    ],
)  # fmt: skip
def test_tensors_that_the_library_leaves_out_are_left_out(name, extra, tmp_path):
    """Buffers in folders of former releases, and a tied output embedding."""
    model = make(name)
    save_changed(model, tmp_path / "source", lambda state: state.update(extra))
    plan = dha.search(tmp_path / "source", 0.5, progress=False)
    fold_folder(tmp_path / "source", plan, tmp_path / "folded", progress=False)
    folded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(folded.eval()(tokens()).logits, dha.from_plan(model, plan)(tokens()).logits)


@pytest.mark.parametrize("name", ["llama-gqa-bias-tied", "qwen2-bias", "neox-partial-rotary"])
@pytest.mark.parametrize("tensors", [1, 9])
def test_an_interrupted_fold_continues(name, tensors, tmp_path, monkeypatch, capsys):
    """In the middle of a stored tensor, too: GPT-NeoX's hold three. What is written is not written again."""
    make(name).save_pretrained(tmp_path / "source", max_shard_size="20KB")
    plan = dha.search(tmp_path / "source", 0.5, progress=False)
    options = {"max_shard_size": 20_000}
    fold_folder(tmp_path / "source", plan, tmp_path / "straight", progress=False, **options)
    write, written = folding.SafetensorsWriter.write, []

    def interrupted(self, name, tensor):
        if len(written) == tensors:
            raise KeyboardInterrupt
        write(self, name, tensor)
        written.append(name)

    monkeypatch.setattr(folding.SafetensorsWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fold_folder(tmp_path / "source", plan, tmp_path / "folded", progress=False, **options)
    assert not (tmp_path / "folded").exists()
    with open(tmp_path / ".folded.incomplete" / ".unfinished", "a") as record:
        record.write("model.layers.1.post_attention_layernorm.weight")  # no end of the line: it may not be written
    before, again = list(written), []

    def counting(self, name, tensor):
        again.append(name)
        write(self, name, tensor)

    monkeypatch.setattr(folding.SafetensorsWriter, "write", counting)
    fold_folder(tmp_path / "source", plan, tmp_path / "folded", **options)
    assert f"folding continues: {tensors} of" in capsys.readouterr().out
    assert not {*before} & {*again}
    files = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "folded").iterdir()) and "README.md" not in files
    for file in files:
        assert (tmp_path / "folded" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes(), file
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("change", ["plan", "operators", "source", "shards"])
def test_an_interrupted_fold_of_something_else_starts_anew(change, tmp_path, monkeypatch):
    model = make("llama")
    model.save_pretrained(tmp_path / "source")
    plan = dha.search(model, 0.5, progress=False)
    write = folding.SafetensorsWriter.write
    arguments = {"plan": plan, "operators": None, "max_shard_size": "5GB"}

    def fold():
        return fold_folder(tmp_path / "source", output=tmp_path / "folded", progress=False, **arguments)

    def interrupted(self, name, tensor):
        write(self, name, tensor)
        if "k_proj" in name:
            raise KeyboardInterrupt

    monkeypatch.setattr(folding.SafetensorsWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fold()
    monkeypatch.setattr(folding.SafetensorsWriter, "write", write)
    if change == "plan":
        arguments["plan"] = plan = dha.uniform_plan(model, 0.5)
    elif change == "operators":
        width = plan.source.head_dim
        groups = {(layer, kind): (len(of), len(of[0]), width) for layer, kind, of in plan.parts}
        arguments["operators"] = {part: torch.full(shape, 0.25) for part, shape in groups.items()}
    elif change == "shards":
        arguments["max_shard_size"] = 20_000
    else:
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2)  # of the same signs, so of the same fingerprint
        model.save_pretrained(tmp_path / "source")
    fold()
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    expected = folding.fold_model(dha.HeadSource(model), arguments["plan"], arguments["operators"])
    assert torch.equal(folded.eval()(tokens()).logits, expected(tokens()).logits)


# --- what cannot be a source ------------------------------------------------------------------------------------------

NO_SOURCES = [
    (Olmo2Config(), "QK-norm is over all heads"),
    (DeepseekV3Config(), "MLA"),
    (T5Config(), "cross-attention"),
    (GptOssConfig(), "sinks"),
    (Gemma2Config(), "capped"),
    (Gemma3nTextConfig(), "share keys and values"),
    (DCFormerConfig(**SIZES, head_embeddings="add"), "one seed"),
]


@pytest.mark.parametrize(("config", "reason"), NO_SOURCES, ids=lambda value: getattr(value, "model_type", value))
def test_other_attention_is_refused_with_its_reason(config, reason):
    with pytest.raises(DCFormerError, match=reason) as error:
        find_family(config)
    assert config.model_type in str(error.value) and "supported are llama, mistral" in str(error.value)


def test_unknown_models_are_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=9))
    with pytest.raises(DCFormerError, match="expected a \\.\\.\\.ForCausalLM"):
        dha.search(model, 0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(DCFormerError, match=r"add_cross_attention|'gpt2' is not known as a source"):
        dha.search(tmp_path, 0.5)
    with pytest.raises(DCFormerError, match=r"no config\.json"):
        dha.search(tmp_path / "none", 0.5)
    for other in (LlamaForSequenceClassification(make("llama").config), DCFormerModel(DCFormerConfig(**SIZES))):
        with pytest.raises(DCFormerError, match="ForCausalLM"):
            dha.search(other, 0.5)
    with pytest.raises(DCFormerError, match="not a model of Transformers"):
        dha.search(torch.nn.Linear(2, 2), 0.5)


def test_converted_models_are_refused(tmp_path):
    """By name, in memory and in a folder; nobody is told to remove their composition from its files."""
    model = convert_attention(make("llama"))
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        with pytest.raises(DCFormerError, match="a llama model cannot be a source: its heads are composed by convert_"):
            dha.search(source, 0.5)


def test_quantized_sources_are_refused(tmp_path):
    """4 and 8 bit: by the configuration, and by the tensors themselves."""
    model = make("llama")
    plan = dha.uniform_plan(model, 0.5)
    model.save_pretrained(tmp_path / "bits")
    config = json.loads((tmp_path / "bits" / "config.json").read_text())
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "bits" / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(DCFormerError, match=r"quantized.*dequantize"):
        fold_folder(tmp_path / "bits", plan, tmp_path / "folded", progress=False)
    (tmp_path / "bits" / "config.json").write_text(json.dumps(config))
    state = load_file(tmp_path / "bits" / "model.safetensors")
    state["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(512, 1, dtype=torch.uint8)
    save_file(state, tmp_path / "bits" / "model.safetensors", {"format": "pt"})
    with pytest.raises(DCFormerError, match=r"k_proj\.weight is stored as U8: quantized"):
        fold_folder(tmp_path / "bits", plan, tmp_path / "folded", progress=False)
    model.config.quantization_config = quantization
    with pytest.raises(DCFormerError, match=r"quantized.*dequantize"):
        dha.from_plan(model, plan)
    assert not (tmp_path / "folded").exists()


def test_adapters_are_to_be_merged_first(tmp_path):
    peft = pytest.importorskip("peft")
    model, plain = make("llama"), make("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"]))
    plan = dha.uniform_plan(plain, 0.5)
    for wrapped in (adapted, model):
        with pytest.raises(DCFormerError, match=r"merge|not a model of Transformers"):
            dha.from_plan(wrapped, plan)
    adapted.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(plain.config.to_json_string())
    with pytest.raises(DCFormerError, match="adapters"):
        dha.search(tmp_path, 0.5)
    merged = adapted.merge_and_unload()
    assert dha.from_plan(merged, plan).config.num_key_heads == [4, 4]


def test_a_model_in_shards_is_to_be_loaded_again(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make("llama")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(DCFormerError, match="in shards over several processes"):
            dha.search(model, 0.5, progress=False)
    finally:
        torch.distributed.destroy_process_group()


def test_only_the_mean_is_made_without_training():
    with pytest.raises(DCFormerError, match="init='random'"):
        dha.from_plan(make("llama"), dha.uniform_plan(make("llama"), 0.5), init="random")


# --- a report ---------------------------------------------------------------------------------------------------------


def test_report_counts_what_a_cache_holds():
    """Of a plain and a composed model, with a window; parameters by the models themselves."""
    for name in ("llama", "mistral-window", "dcformer-composed-gqa", "qwen2-bias"):
        model = make(name)
        whole = dha.from_plan(model, dha.uniform_plan(model, 1.0))
        folded = dha.from_plan(model, dha.search(model, 0.5, allocation="displacement", progress=False))
        found = dha.report(folded, context=4, dtype=torch.float32)
        with torch.no_grad():
            caches = [m(tokens(1, 4)).past_key_values for m in (folded, whole)]
        measured = [sum(k.nbytes + v.nbytes for k, v, *_ in cache) for cache in caches]
        assert [found.cache_bytes, found.source_cache_bytes] == measured
        assert 4 * found.token_bytes == measured[0]
        assert found.parameters_removed == whole.num_parameters() - folded.num_parameters()
        assert found.kv_saving == folded.config.kv_saving == 0.5
    windowed = dha.report(folded_window(), context=1000, dtype=torch.float32)
    assert windowed.cache_bytes == 6 * windowed.token_bytes  # all layers hold six tokens


def test_report_counts_the_wider_keys_of_head_embeddings():
    model = DCFormerForCausalLM(tiny_config(head_embeddings="add", num_key_value_heads=1, **PLAIN)).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, 3, dtype=torch.long)).past_key_values
    found = dha.report(model, context=3, dtype=torch.float32)
    assert found.cache_bytes == found.source_cache_bytes == sum(k.nbytes + v.nbytes for k, v, *_ in cache)


def folded_window():
    model = make("mistral-window")
    return dha.from_plan(model, dha.uniform_plan(model, 0.5))


def test_report_as_text():
    llama2 = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "head_dim": 128}
    config = DHAConfig(**llama2)
    quarter = [[head // 4 for head in range(32)]] * 32
    config.key_head_map = config.value_head_map = quarter
    found = dha.report(config)
    # Llama-2-7B in bfloat16: 512 KiB per token
    assert (found.source_token_bytes, found.token_bytes) == (512 * 1024, 128 * 1024)
    assert found.parameters_removed == pytest.approx(0.81e9, rel=0.01)
    text = str(found)
    assert "256 key and 256 value heads, 75.0% of 2048 saved" in text
    assert "131,072 bytes per token, 25.0% of 524,288" in text and "512.00 MiB of 2,048.00 MiB" in text
    with pytest.raises(DCFormerError, match="a llama model has no head maps"):
        dha.report(make("llama"))
    with pytest.raises(DCFormerError, match="head_system='collaborative' has no head maps"):
        dha.report(HeadSystemsConfig(head_system="collaborative"))
    for wrong, message in (({"context": 0}, "context=0"), ({"context": "a"}, "context='a'"),
                           ({"dtype": "bfloat16"}, r"dtype='bfloat16'.*torch\.bfloat16")):  # fmt: skip
        with pytest.raises(DCFormerError, match=message):
            dha.report(config, **wrong)


# --- memory -----------------------------------------------------------------------------------------------------------

FOLD = """
import pathlib, re, sys
from dcformer import dha

def status(name):
    return int(re.search(name + r":\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

folder = pathlib.Path(sys.argv[1])
plan = dha.HeadPlan.load(folder / "plan.json")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
dha.fold_folder(folder / "source", plan, folder / "folded", progress=False)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_folding_holds_less_than_a_shard_and_a_layer(tmp_path):
    """In a process of its own, from 240 MB in shards of about 33 MB, a little more than a layer."""
    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 7, "num_attention_heads": 16}
    model = llama(**fields).bfloat16()
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "source", max_shard_size="40MB")
    shards = [file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors")]
    dha.uniform_plan(model, 0.25).save(tmp_path / "plan.json")
    command = [sys.executable, "-c", FOLD, str(tmp_path)]
    needed = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    largest = max(tensor.nbytes for tensor in model.parameters())
    assert largest <= needed <= max(shards) + layer < whole / 2


def test_heads_of_a_system_are_refused():
    model = HeadSystemsForCausalLM(HeadSystemsConfig(**SIZES, head_system="collaborative"))
    for call in (lambda: dha.search(model, 0.5), lambda: dha.uniform_plan(model.config, 0.5)):
        with pytest.raises(DCFormerError, match="the projections of its heads are a head system's"):
            call()


@torch.no_grad()
def test_a_model_with_one_map_is_expanded():
    """Where there is no map, heads share as in grouped-query attention."""
    config = DHAConfig(**SIZES, key_head_map=[[0, 1] * 4, [0, 0, 1, 2, 1, 2, 3, 3]])
    model = randomize(DHAForCausalLM(config)).eval()
    ids = torch.arange(3, 14)[None]
    torch.testing.assert_close(dha.expand(model)(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("rope_parameters", {"rope_parameters": HALF_ROTARY}),
        ("qk_norm_eps", {"qk_norm": True, "qk_norm_eps": 0.01}),
        ("mlp_gates", {"mlp_gates": 4}),
        ("hidden_dropout", {"hidden_dropout": 0.3}),
    ],
)
@torch.no_grad()
def test_what_a_llama_has_not_stays_in_a_model_of_this_package(name, fields):
    """Transformers' Llama and its kin know no such field, or ignore it: the function would be another one."""
    model = randomize(DHAForCausalLM(DHAConfig(**SIZES, **fields)), scale=1.0).eval()
    folded = dha.from_plan(model, dha.search(model, 0.5, tie=True, progress=False))
    expanded = dha.expand(folded)
    assert type(expanded) is DHAForCausalLM
    torch.testing.assert_close(expanded(tokens()).logits, folded(tokens()).logits, rtol=0, atol=2e-5)
    with pytest.raises(DCFormerError, match=f"llama: {name}" if name != "qk_norm_eps" else "qwen3: .*qk_norm_eps"):
        dha.to_gqa(folded)


@pytest.mark.parametrize("kind", ["default", "proportional"])
@pytest.mark.parametrize("name", ["llama", "qwen3-qk-norm"])
@torch.no_grad()
def test_a_source_is_read_as_the_library_runs_it(name, kind):
    """Llama ignores `partial_rotary_factor` but for one kind of RoPE; Qwen3's heads' norms have the epsilon of all."""
    config = make(name).config
    config.rope_parameters = HALF_ROTARY | {"rope_type": kind}
    config.rms_norm_eps = 0.05
    torch.manual_seed(0)
    source = randomize(AutoModelForCausalLM.from_config(config), scale=1.0).eval()
    folded = dha.from_plan(source, dha.search(source, kv_ratio=1.0, progress=False))
    torch.testing.assert_close(folded(tokens()).logits, source(tokens()).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rope", [{"partial_rotary_factor": 1.0}, {"rope_type": "proportional"}], ids=str)
@torch.no_grad()
def test_rope_that_a_llama_has_too(rope):
    """A whole factor is none, and of "proportional" a Llama reads it."""
    model = randomize(DHAForCausalLM(DHAConfig(**SIZES, rope_parameters=HALF_ROTARY | rope)), scale=1.0).eval()
    folded = dha.from_plan(model, dha.search(model, 0.5, tie=True, progress=False))
    expanded = dha.expand(folded)
    assert type(expanded).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(expanded(tokens()).logits, folded(tokens()).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_a_window_that_no_layer_has_keeps_nothing_from_being_a_librarys_model(qk_norm):
    """It is a default of DCFormer."""
    config = DCFormerConfig(**SIZES, **PLAIN, qk_norm=qk_norm, layer_pattern="G")
    assert config.sliding_window is not None
    model = randomize(DCFormerForCausalLM(config), scale=1.0).eval()
    folded = dha.from_plan(model, dha.search(model, 0.5, tie=True, progress=False))
    for made in (dha.expand(folded), dha.to_gqa(folded)):
        assert type(made).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
        assert getattr(made.config, "sliding_window", None) is None
        assert not getattr(made.config, "use_sliding_window", False)
        torch.testing.assert_close(made(tokens()).logits, folded(tokens()).logits, rtol=0, atol=2e-5)


def test_a_plan_may_be_a_file(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "source")
    plan = dha.search(model, 0.5, progress=False)
    plan.save(tmp_path / "plan.json")
    assert dha.from_plan(tmp_path / "source", str(tmp_path / "plan.json")).config.num_key_heads == [4, 4]
    fold_folder(tmp_path / "source", tmp_path / "plan.json", tmp_path / "folded", progress=False)
    assert dha.HeadPlan.load(tmp_path / "folded" / "plan.json") == plan
    for call in (
        lambda: dha.from_plan(model, None),
        lambda: fold_folder(tmp_path / "source", None, tmp_path / "other", progress=False),
    ):
        with pytest.raises(DCFormerError, match="a NoneType is not a plan: give the HeadPlan"):
            call()
    with pytest.raises(DCFormerError, match="cannot be read"):
        dha.from_plan(model, tmp_path / "none.json")
