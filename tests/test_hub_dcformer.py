"""Folders in the format of the authors' Hub repositories load directly: tensors, configuration, tokenizer, errors.

The folders are written here by hand, tensor by tensor from the description of that format, and not with the table that
loading uses.
"""

import json
import logging
import os
import pickle
import re
import shutil

import pytest
import torch
from helpers import randomize, tiny_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import logging as transformers_logging

import dcformer
from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.conversion import convert_hub_to_safetensors
from dcformer.hub_dcformer import hub_conversions, load_hub_folder
from dcformer.tokens_dcformer import tokenizer_special_ids

GENERATORS = [("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key")]
AUTHORS_KEYS = {"dim", "n_layer", "n_head", "n_local_heads", "block_size", "window_type", "window_size", "query_wise"}
AUTHORS_KEYS |= {"use_dcmha", "use_qk_norm", "rope_base", "mgate", "mgate_dim", "rotary_pct", "use_linear_bias"}
AUTHORS_KEYS |= {"auto_map", "use_sw", "static_proj", "torch_dtype"}


# --- the hub format, by hand ------------------------------------------------------------------------------------------


def native_model(pythia=False, **fields):
    """A random model with the settings that the authors' PyTorch code has fixed."""
    common = {"compose_act": "gelu", "qk_norm_eps": 1e-6, "norm_eps": 1e-5} | fields
    if not pythia:
        return randomize(DCFormerForCausalLM(tiny_config(**common)))
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = DCPythiaConfig(**sizes, num_attention_heads=4, sliding_window=8, max_position_embeddings=128, **common)
    return randomize(DCPythiaForCausalLM(config))


def authors_tensors(model, fused=True, stale=True, identity=True):
    """The tensors of a model as the authors store them: always four weight generators, garbage for those not in use."""
    config, native = model.config, model.state_dict()
    h, g, r, e = config.num_attention_heads, config.compose_groups, config.compose_rank, config.hidden_size
    m = h // g
    k, used = 2 * r * m, [GENERATORS.index(generator) for generator in config.compose_generators]
    stored = {"tok_embeddings.weight": native["model.embed_tokens.weight"], "output.weight": native["lm_head.weight"]}
    for kind in ("weight", "bias"):
        if f"model.norm.{kind}" in native:
            stored[f"norm.{kind}"] = native[f"model.norm.{kind}"]
    for i in range(config.num_hidden_layers):
        ours = {name.split(".", 3)[3]: t for name, t in native.items() if name.startswith(f"model.layers.{i}.")}
        new = {}
        for kind in ("weight", "bias"):
            names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
            names |= {"self_attn.o_proj": "attention.wo", "mlp.down_proj": "feed_forward.w2"}
            if config.mlp_type == "gated":
                names |= {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
            else:
                names |= {"mlp.up_proj": "feed_forward.w1"}
            for old, name in names.items():
                if f"{old}.{kind}" in ours:
                    new[f"{name}.{kind}"] = ours[f"{old}.{kind}"]
            if f"self_attn.q_proj.{kind}" not in ours:
                continue
            parts = [ours[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
            if fused:
                new[f"attention.wqkv.{kind}"] = torch.cat(parts)
            else:
                new |= {f"attention.w{name}.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        if config.mlp_gates:
            new["feed_forward.mg.weight"] = ours["mlp.multi_gate_proj.weight"]
        if config.qk_norm:
            new |= {f"attention.{side}_norm.scale": ours[f"self_attn.{side}_norm.weight"] for side in "qk"}
        dynamic = "attention.dyn_w_proj."
        if used:
            dw1, qkw, dd = torch.randn(e, g, 4, k), torch.randn(g, 4, k, 2 * r, m), torch.randn(e, g, 4 * m)
            for group in range(g):
                for place, generator in enumerate(used):
                    block = group * len(used) + place
                    rows = slice(block * k, (block + 1) * k)
                    dw1[:, group, generator] = ours["self_attn.compose.dw1_proj.weight"][rows].T
                    qkw[group, generator] = ours["self_attn.compose.qkw"][rows].reshape(k, 2 * r, m)
                    gates = ours["self_attn.compose.gate_proj.weight"][block * m : (block + 1) * m]
                    dd[:, group, generator * m : (generator + 1) * m] = gates.T
            new |= {dynamic + "dw1": dw1, dynamic + "qkw": qkw, dynamic + "dd": dd}
            if stale:
                new[dynamic + "dw_m"] = torch.randn(e, 4 * g * (k + m))
                new[dynamic + "qkw_m"] = torch.randn(4 * g, k, 2 * r * m)
        for stage in ("pre", "post"):
            if config.compose_static:
                new[f"{dynamic}{stage}_proj.w"] = ours[f"self_attn.compose.{stage}_static"].reshape(g, m, m)
            elif identity:
                new[f"{dynamic}{stage}_proj.w"] = torch.eye(m).repeat(g, 1, 1)
        if config.compose_static and stale:
            new[dynamic + "sw"] = torch.randn(2 * g, m, m)
        stored |= {f"layers.{i}.{name}": t for name, t in new.items()}
    dtype = next(model.parameters()).dtype
    return {name: t.detach().to(dtype).contiguous().clone() for name, t in stored.items()}


def authors_config(config, **extra):
    pythia = config.model_type == "dcpythia"
    name = "DCPythia" if pythia else "DCFormer"
    keys = {
        "architectures": [name],
        "auto_map": {
            "AutoConfig": f"configuration_{name.lower()}.{name}Config",
            "AutoModelForCausalLM": f"modeling_{name.lower()}.{name}",
        },
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_local_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "block_size": config.max_position_embeddings,
        "norm_eps": config.norm_eps,
        "rope_base": 10000,
        "use_dcmha": True,
        "use_qk_norm": config.qk_norm,
        "query_wise": not config.compose_key,
        "window_size": 8,
        "window_type": None,
        "q_chunk_size": 128,
        "mgate": bool(config.mlp_gates),
        "mgate_dim": config.mlp_gates or 44,
        "is_training": False,
        "use_gradient_checkpointing": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "transformers_version": "4.46.3",
    }
    if pythia:
        keys |= {"rotary_pct": 0.25, "use_linear_bias": True, "use_parallel_residual": True}
    return keys | extra


def write_weights(folder, tensors, files="pytorch_model.bin"):
    """One file, or with "sharded.bin" and "sharded.safetensors" two and an index."""
    if files == "pytorch_model.bin":
        torch.save(tensors, folder / files)
    elif files == "model.safetensors":
        save_file(tensors, folder / files, metadata={"format": "pt"})
    else:
        suffix = files.partition(".")[2]
        stem = "pytorch_model" if suffix == "bin" else "model"
        weight_map = {name: f"{stem}-0000{1 + i % 2}-of-00002.{suffix}" for i, name in enumerate(sorted(tensors))}
        for file in set(weight_map.values()):
            part = {name: tensors[name] for name in tensors if weight_map[name] == file}
            if suffix == "bin":
                torch.save(part, folder / file)
            else:
                save_file(part, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def write_folder(folder, model, files="pytorch_model.bin", keys=None, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(authors_config(model.config, **(keys or {}))))
    tensors = authors_tensors(model, **options)
    write_weights(folder, tensors, files)
    return tensors


def change_config(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.fixture
def logged(caplog):
    """The messages of level warning and above so far, those of Transformers included."""
    transformers_logging.enable_propagation()
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    transformers_logging.disable_propagation()


def logits_of(model, length=24):
    with torch.no_grad():
        return model(torch.arange(length)[None] * 7 % model.config.vocab_size).logits


def assert_same_state(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


# --- loading ----------------------------------------------------------------------------------------------------------

# name -> (fields of the native model, how the folder is written)
LGLL = {"num_hidden_layers": 5, "layer_pattern": "LGLL", "sliding_window": 256}
LGL6 = {"num_hidden_layers": 9, "layer_pattern": "LGL6", "sliding_window": 256}
CASES = {
    "fused": ({}, {}),
    "separate": ({}, {"fused": False}),
    "no buffers": ({}, {"stale": False, "identity": False}),
    "multi-head": ({"num_key_value_heads": 4}, {}),
    "mgate": ({"mlp_gates": 8}, {}),
    "LGLL": (LGLL, {"keys": {"window_type": "LGLL"}}),
    "LGL6": (LGL6, {"keys": {"window_type": "LGL6"}}),
    "query-wise": ({"compose_key": False}, {}),
    "static, found in the tensors": ({"compose_static": True}, {}),
    "static, use_sw": ({"compose_static": True}, {"keys": {"use_sw": True}}),
    "static, static_proj": ({"compose_static": True}, {"keys": {"static_proj": True, "use_sw": None}}),
    "static, query-wise": ({"compose_static": True, "compose_key": False}, {}),
    "not static, use_sw": ({}, {"keys": {"use_sw": False}}),
    "no qk-norm": ({"qk_norm": False}, {}),
    "groups": ({"compose_groups": 2, "compose_static": True}, {}),
    "groups, query-wise": ({"compose_groups": 2, "compose_key": False}, {}),
    "rank": ({"compose_rank": 3}, {}),
    "head dim": ({"head_dim": 16}, {}),
    "pythia": ({"pythia": True}, {}),
    "pythia, separate": ({"pythia": True}, {"fused": False}),
    "pythia, static, query-wise": ({"pythia": True, "compose_static": True, "compose_key": False}, {}),
    "pythia, grouped": ({"pythia": True, "num_key_value_heads": 2, "compose_rank": 1}, {}),
    "sharded": ({"compose_static": True}, {"files": "sharded.bin"}),
    "safetensors": ({"compose_static": True}, {"files": "model.safetensors"}),
    "sharded safetensors": ({}, {"files": "sharded.safetensors"}),
}


@pytest.mark.parametrize("case", CASES)
def test_folders_load(case, tmp_path, logged):
    fields, options = CASES[case]
    model = native_model(**fields)
    write_folder(tmp_path / "hub", model, **options)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    assert_same_state(loaded, model)
    assert torch.equal(logits_of(loaded), logits_of(model))
    for name in ("layer_types", "sliding_window", "compose_groups", "compose_rank", "compose_static", "mlp_gates"):
        assert getattr(loaded.config, name) == getattr(model.config, name), name
    assert loaded.config.base_model_tp_plan == model.config.base_model_tp_plan
    assert not hasattr(loaded.config, "auto_map")

    loaded.save_pretrained(tmp_path / "native")
    stored = load_file(tmp_path / "native" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    written = json.loads((tmp_path / "native" / "config.json").read_text())
    assert not set(written) & AUTHORS_KEYS
    assert not [key for key in written if key.startswith("_")]
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(again, loaded)
    assert torch.equal(logits_of(again), logits_of(model))
    assert again.config.to_diff_dict() == loaded.config.to_diff_dict()

    convert_hub_to_safetensors(tmp_path / "hub", tmp_path / "converted", progress=False)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert_same_state(converted, loaded)
    assert converted.config.to_diff_dict() == loaded.config.to_diff_dict()
    assert logged() == []


@pytest.mark.parametrize("trust_remote_code", [None, False, True])
def test_remote_code_is_not_used(tmp_path, trust_remote_code, logged):
    model = native_model()
    write_folder(tmp_path, model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust_remote_code)
    assert type(loaded) is DCFormerForCausalLM
    assert_same_state(loaded, model)
    assert logged() == []


def test_class_instead_of_auto_class(tmp_path):
    """Without an Auto class `from_pretrained` reads the configuration itself; other arguments still arrive."""
    model = native_model(compose_static=True, compose_groups=2)
    write_folder(tmp_path, model)
    loaded, info = DCFormerForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", use_cache=False, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.config._attn_implementation == "eager" and loaded.config.use_cache is False
    assert loaded.dtype == torch.float64
    torch.testing.assert_close(logits_of(loaded).float(), logits_of(model), atol=1e-5, rtol=1e-5)
    from_name = DCFormerForCausalLM.from_pretrained(tmp_path, config=str(tmp_path))
    assert_same_state(from_name, model)


def test_configuration_given(tmp_path):
    """One that was loaded before is not changed and can be used again."""
    model = native_model(compose_static=True)
    write_folder(tmp_path, model)
    config = AutoConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    for _ in range(2):
        assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path, config=config), model)
    assert config.to_dict() == before and not config.compose_static
    assert "undecided_fields" not in before
    native = DCFormerForCausalLM.from_pretrained(tmp_path, config=model.config)  # this package's keys: as they are
    assert_same_state(native, model)


def test_keys_of_the_format_override_too(tmp_path):
    """Those that the folder's own configuration has, beside this package's names for them."""
    model = native_model(num_hidden_layers=3)
    write_folder(tmp_path, model)
    for auto_class in (AutoModelForCausalLM, DCFormerForCausalLM):
        loaded = auto_class.from_pretrained(tmp_path, n_layer=1, window_size=5, window_type=None)
        assert (len(loaded.model.layers), loaded.config.num_hidden_layers) == (1, 1)
        assert loaded.config.sliding_window == 5
    model.config.num_hidden_layers = 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, n_layer=1)
    assert torch.equal(logits_of(loaded), logits_of(model))
    config = AutoConfig.from_pretrained(tmp_path, n_layer=2, block_size=77)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (2, 77)


def test_more_layers_than_the_configuration_has(tmp_path):
    """It is another checkpoint's, and the model would compute something else."""
    write_folder(tmp_path, native_model(num_hidden_layers=3))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layer": 2}))
    with pytest.raises(ValueError, match="has tensors of layer 2, and its configuration has n_layer=2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1).model.layers) == 1


@pytest.mark.parametrize(
    ("fields", "keys", "named"),
    [
        ({"qk_norm": True}, {"use_qk_norm": False}, r"has 4 tensors .* no place for: .*k_norm"),
        ({}, {"use_dcmha": False}, r"has \d+ tensors .*compose.*\.\.\."),
        ({"mlp_gates": 4}, {"mgate": False}, r"has 2 tensors .*gate"),
        ({"pythia": True}, {"use_linear_bias": False}, r"has \d+ tensors .*bias"),
    ],
    ids=str,
)
def test_tensors_that_the_configuration_knows_nothing_of(fields, keys, named, tmp_path):
    """The model would compute something else; not where that was asked for."""
    write_folder(tmp_path, native_model(**fields), keys=keys)
    with pytest.raises(ValueError, match=named):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    for asked in ({"num_hidden_layers": 1}, {"compose_rank": 2, "compose_groups": 1, "compose_static": False}):
        with pytest.raises(ValueError, match="no place for"):  # they have nothing to do with it
            AutoModelForCausalLM.from_pretrained(tmp_path, **asked)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"]
    write_folder(tmp_path, native_model(**fields))
    asked = {"use_dcmha": False} if "use_dcmha" in keys else {}
    AutoModelForCausalLM.from_pretrained(tmp_path, **asked)


def test_what_the_caller_says_of_undecided_fields(tmp_path):
    """It is taken, also where the configuration was written anew; what the tensors contradict is an error."""
    model = native_model(compose_static=True)
    write_folder(tmp_path, model)
    for _ in range(2):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.config.compose_static and loaded.config.compose_rank == model.config.compose_rank
        assert not AutoModelForCausalLM.from_pretrained(tmp_path, compose_static=False).config.compose_static
        with pytest.raises(RuntimeError):
            AutoModelForCausalLM.from_pretrained(tmp_path, compose_rank=model.config.compose_rank + 1)
        every = {"compose_rank": model.config.compose_rank, "compose_groups": 1, "compose_static": True}
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, **every)), logits_of(model))
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tmp_path, **every).save_pretrained(tmp_path)  # nothing is left open
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if "layers.1." not in name})
    for options in (every, {"config": AutoConfig.from_pretrained(tmp_path, **every)}, {}):
        with pytest.raises(ValueError, match="of the tensors of DCFormerForCausalLM"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    file = tmp_path / "config.json"
    for wrong in (None, ["foo"], "compose_rank"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"undecided_fields": wrong}))
        with pytest.raises(ValueError, match=r"undecided_fields=.* in the configuration: expected a list of some of"):
            AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("base", [None, "10k", []])
def test_a_base_of_rope_that_is_no_number(base, tmp_path):
    write_folder(tmp_path, native_model(), keys={"rope_base": base})
    with pytest.raises(ValueError, match=r"rope_base=.* is not a number"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_static_projection_that_is_a_number(tmp_path):
    tensors = write_folder(tmp_path, native_model())
    write_weights(tmp_path, tensors | {"layers.0.attention.dyn_w_proj.pre_proj.w": torch.tensor(1.0)})
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_fewer_layers(tmp_path):
    model = native_model(num_hidden_layers=3)
    write_folder(tmp_path / "authors", model)
    config = AutoConfig.from_pretrained(tmp_path / "authors", num_hidden_layers=2)
    assert (config.num_hidden_layers, config.layer_types) == (2, model.config.layer_types[:2])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "authors", num_hidden_layers=2)
    model.config.num_hidden_layers = 2
    expected = logits_of(model)
    assert torch.equal(logits_of(loaded), expected)
    for name, original in (("native", False), ("again", True)):
        loaded.save_pretrained(tmp_path / name, save_original_format=original)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert len(again.model.layers) == len(again.config.layer_types) == 2
        assert torch.equal(logits_of(again), expected)
    with pytest.raises(ValueError, match=r"len\(layer_types\)=3 must equal num_hidden_layers=4"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "authors", num_hidden_layers=4)
    pattern = AutoConfig.from_pretrained(tmp_path / "authors", num_hidden_layers=4, layer_pattern="G")
    assert pattern.layer_types == ["full_attention"] * 4


def test_state_dict_given(tmp_path):
    model = native_model(compose_groups=2)
    tensors = write_folder(tmp_path, model)
    config = AutoConfig.from_pretrained(tmp_path)
    loaded, info = DCFormerForCausalLM.from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True
    )
    assert not any(info.values()), info
    assert_same_state(loaded, model)


def test_other_model_classes(tmp_path, logged):
    model = native_model(compose_static=True)
    write_folder(tmp_path, model)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == set() and info["unexpected_keys"] == {"lm_head.weight"}
    assert_same_state(base, model.model)
    base.save_pretrained(tmp_path / "base")
    assert_same_state(AutoModel.from_pretrained(tmp_path / "base"), model.model)
    for auto_class in (AutoModelForSequenceClassification, dcformer.DCFormerForTokenClassification):
        loaded, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert {name.split(".")[0] for name in info["missing_keys"]} == {"score"}
        assert_same_state(loaded.model, model.model)
    answers = dcformer.DCFormerForQuestionAnswering.from_pretrained(tmp_path)
    assert_same_state(answers.base_model, model.model)


@pytest.mark.parametrize("files", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("dtype", ["unset", "auto", torch.float32, torch.bfloat16])
def test_dtype(tmp_path, dtype, files):
    model = native_model(compose_static=True).half()
    write_folder(tmp_path, model, files=files, keys={"torch_dtype": "float16"})
    wanted = {} if dtype == "unset" else {"dtype": dtype}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **wanted)
    assert not any(info.values()), info
    expected = dtype if isinstance(dtype, torch.dtype) else torch.float16
    assert loaded.config.dtype == expected
    assert_same_state(loaded, model.to(expected))


def test_identity_buffers_in_half_precision(tmp_path, logged):
    write_folder(tmp_path, native_model().half(), keys={"torch_dtype": "float16"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and not loaded.config.compose_static
    assert logged() == []


@pytest.mark.parametrize("real", ["layers.0.self_attn.compose.pre_static", "layers.2.self_attn.compose.post_static"])
def test_one_real_projection_in_any_shard_is_enough(tmp_path, real):
    model = native_model(compose_static=True, num_hidden_layers=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_static") and name != f"model.{real}":
                parameter.copy_(torch.eye(4))
    write_folder(tmp_path, model, files="sharded.bin")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_safetensors_are_preferred(tmp_path):
    model = native_model()
    write_folder(tmp_path, native_model(compose_static=True))  # another model: the peek must look at the same files
    write_weights(tmp_path, authors_tensors(model), "model.safetensors")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    assert loaded.config.compose_static


def test_variant_subfolder_and_old_files(tmp_path):
    model = native_model(compose_static=True)
    folder = tmp_path / "hub" / "inner"
    folder.parent.mkdir()
    tensors = write_folder(folder, model)
    (folder / "pytorch_model.bin").unlink()
    torch.save(tensors, folder / "pytorch_model.old.bin", _use_new_zipfile_serialization=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", subfolder="inner", variant="old")
    assert_same_state(loaded, model)


def test_repository_of_the_hub(tmp_path, logged):
    """From the cache, as after a download."""
    model = native_model(compose_static=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--someone--something"
    (cached / "refs").mkdir(parents=True)
    (cached / "snapshots").mkdir()
    (cached / "refs" / "main").write_text(commit)
    write_folder(cached / "snapshots" / commit, model, files="sharded.bin")
    tokenizer_json(cached / "snapshots" / commit, words=97)
    for model_class in (AutoModelForCausalLM, DCFormerForCausalLM):
        loaded, info = model_class.from_pretrained(
            "someone/something", cache_dir=tmp_path, local_files_only=True, output_loading_info=True
        )
        assert not any(info.values()), info
        assert_same_state(loaded, model)
        assert loaded.config.eos_token_id == 0
    assert len(logged()) == 2 and "someone/something" in logged()[0]


@pytest.mark.parametrize("files", ["pytorch_model.bin", "model.safetensors"])
def test_offloaded_to_disk(tmp_path, files):
    model = native_model(compose_static=True)
    write_folder(tmp_path / "hub", model, files=files)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk", "lm_head": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hub", device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_loaded_tensors_are_independent(tmp_path):
    """No parameter keeps another's memory alive, and the folder can go."""
    write_folder(tmp_path / "hub", native_model())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    shutil.rmtree(tmp_path / "hub")
    attention = model.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert projection.weight.untyped_storage().nbytes() == projection.weight.numel() * 4
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    ids = torch.arange(20)[None]
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- what must still be reported --------------------------------------------------------------------------------------


def test_other_tensors_are_unexpected(tmp_path):
    tensors = write_folder(tmp_path, native_model())
    extra = ["layers.0.attention.dyn_w_proj.other", "layers.0.attention.more.dw_m", "layers.0.attention.wo.weight.more"]
    extra += ["layers.7.attention.wo.weight"]
    write_weights(tmp_path, tensors | {name: torch.zeros(3) for name in extra})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {*extra[:3], "model.layers.7.self_attn.o_proj.weight"}


@pytest.mark.parametrize(
    "keys", [{"use_sw": False}, {"static_proj": False}, {"compose_static": False}, {"use_dcmha": False}], ids=str
)
def test_real_static_projections_are_not_dropped_in_silence(tmp_path, keys):
    write_folder(tmp_path, native_model(compose_static=True), keys=keys)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not model.config.compose_static and not info["missing_keys"]
    names = {f"model.layers.{i}.self_attn.compose.{stage}_static" for i in range(2) for stage in ("pre", "post")}
    assert names <= info["unexpected_keys"]
    if "compose_static" in keys:
        write_folder(tmp_path, native_model(compose_static=True))
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **keys)
        assert not model.config.compose_static


@pytest.mark.parametrize("fields", [{"compose_static": True}, {"compose_rank": 3}, {"compose_groups": 2}], ids=str)
def test_folders_whose_configuration_is_written_anew(tmp_path, fields):
    """Such as with another name or dtype: what the authors' keys left to the tensors still is. Models decide it."""
    model = native_model(**fields)
    write_folder(tmp_path, model)
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert "undecided_fields" in json.loads((tmp_path / "config.json").read_text())
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() and again.undecided_fields == config.undecided_fields
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(loaded, model)
    new = AutoModelForCausalLM.from_config(again)
    for name, saved in (("loaded", loaded), ("new", new)):
        saved.save_pretrained(tmp_path / name)
        assert "undecided_fields" not in (tmp_path / name / "config.json").read_text()
        assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / name), saved)


def test_stated_static_projection(tmp_path):
    """What the configuration says counts, even of identity matrices; tensors that it promises must be there."""
    model = native_model(compose_static=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_static"):
                parameter.copy_(torch.eye(4))
    write_folder(tmp_path, model, keys={"compose_static": True})
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    write_folder(tmp_path, native_model(), keys={"use_sw": True}, identity=False)
    with pytest.raises(ValueError, match="pre_static"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    change_config(tmp_path, static_proj=False)
    with pytest.raises(ValueError, match="contradict"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1.attention.wqkv.weight", r"lacks 3 .*layers\.1\.self_attn\.k_proj"),
        ("output.weight", r"lacks 1 .*lm_head\.weight"),
    ],
)
def test_missing_tensor(tmp_path, name, message):
    tensors = write_folder(tmp_path, native_model())
    del tensors[name]
    write_weights(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# --- native checkpoints and saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pythia", [False, True])
def test_native_names_are_left_alone(pythia):
    model = native_model(pythia=pythia, compose_static=True)
    config = model.config
    heads = [name for name in dcformer.__all__ if name.startswith("DCPythiaFor" if pythia else "DCFormerFor")]
    for mapping in (hub_conversions(config.mlp_type),):
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if not isinstance(entry, WeightRenaming)]
        for head in heads:
            for name in getattr(dcformer, head)(config).state_dict():
                assert rename_source_key(name, renamings, converters) == (name, None)
        for name in model.model.state_dict():
            renamed, pattern = rename_source_key(name, renamings, converters, "model", model.model.state_dict())
            assert (renamed, pattern) == (name, None)


def test_new_models_are_saved_under_native_names(tmp_path):
    model = native_model()
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    model.model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.model.state_dict().keys()


@pytest.mark.parametrize(
    "fields",
    [{"compose_static": True, "compose_groups": 2}, {"compose_key": False, "mlp_gates": 4}, {"pythia": True}],
    ids=str,
)
def test_original_format(tmp_path, fields):
    """`save_original_format=True` writes the authors' tensors of a model that came with them."""
    model = native_model(**fields)
    expected = write_folder(tmp_path / "hub", model, stale=False, identity=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    loaded.save_pretrained(tmp_path / "saved", save_original_format=True)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == expected.keys()
    if model.config.compose_key:  # otherwise the generators not in use are zero instead of garbage
        assert all(torch.equal(stored[name], expected[name]) for name in stored)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(again, model)


def test_original_format_of_native_models(tmp_path):
    model = native_model()
    for source in (model, None, None):
        source = source or AutoModelForCausalLM.from_pretrained(tmp_path)
        source.save_pretrained(tmp_path, save_original_format=True)
        assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


# --- tokenizer --------------------------------------------------------------------------------------------------------


def tokenizer_json(folder, words=20, end_of_text=0):
    """A tokenizer of words, in `tokenizer.json` alone."""
    vocabulary = {f"w{i}": i for i in range(words)}
    del vocabulary[f"w{end_of_text}"]
    vocabulary["<|endoftext|>"] = end_of_text
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture
def hub(tmp_path):
    write_folder(tmp_path / "hub", native_model())
    return tmp_path / "hub"


def test_tokenizer_beside_the_model(hub, logged):
    tokenizer_json(hub)
    alone = AutoTokenizer.from_pretrained(hub)
    assert alone("w5 w7")["input_ids"] == [5, 7]
    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(hub / "tokenizer.json"), eos_token="<|endoftext|>")
    wrapped.save_pretrained(hub)
    loaded = AutoTokenizer.from_pretrained(hub)
    assert loaded("w5 w7")["input_ids"] == [5, 7] and loaded.eos_token_id == 0
    assert logged() == []


@pytest.mark.parametrize(
    "declared",
    ["tokenizer.json alone", "tokenizer_config.json", "special_tokens_map.json", "both", "both, and added tokens"],
)
def test_tokenizer_wins(hub, declared, logged):
    tokenizer_json(hub)
    bos, eos = 0, 0
    if declared != "tokenizer.json alone":
        bos, eos = (8, 9) if declared == "both" else (4, 6)
        added = {"__type": "AddedToken", "content": "w6", "lstrip": False}
        tokens = {"bos_token": "w4", "eos_token": added, "pad_token": None}
        if declared.startswith("both"):  # the library goes by what tokenizer_config.json has
            (hub / "special_tokens_map.json").write_text(json.dumps({"bos_token": "w8", "eos_token": "w9"}))
            tokens |= {"added_tokens_decoder": {}} if declared != "both" else {}
        name = declared if declared == "special_tokens_map.json" else "tokenizer_config.json"
        (hub / name).write_text(json.dumps(tokens | {"tokenizer_class": "PreTrainedTokenizerFast"}))
        if name == "tokenizer_config.json":
            tokenizer = AutoTokenizer.from_pretrained(hub)
            assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)
    model = AutoModelForCausalLM.from_pretrained(hub)
    for holder in (model.config, model.generation_config):
        assert (holder.bos_token_id, holder.eos_token_id) == (bos, eos)
    (message,) = logged()
    assert "eos_token_id=2" in message and f"is {eos}" in message and str(hub) in message

    model.save_pretrained(hub / "saved")
    again = AutoModelForCausalLM.from_pretrained(hub / "saved")
    assert (again.config.eos_token_id, again.generation_config.eos_token_id) == (eos, eos)
    assert len(logged()) == 1
    AutoModelForCausalLM.from_pretrained(hub)
    assert len(logged()) == 2  # once per load


def test_a_map_of_tokens_that_the_library_does_not_read(hub):
    tokenizer_json(hub)
    (hub / "special_tokens_map.json").write_text(json.dumps({"bos_token": "w8", "eos_token": "w9"}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
    (hub / "tokenizer_config.json").write_text(json.dumps(settings))
    assert AutoTokenizer.from_pretrained(hub).eos_token is None
    config = AutoModelForCausalLM.from_pretrained(hub).config
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)


def test_null_in_a_map_of_tokens_takes_precedence(hub):
    tokenizer_json(hub)
    (hub / "special_tokens_map.json").write_text(json.dumps({"eos_token": None}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w4", "eos_token": "w6"}
    (hub / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(hub)
    assert tokenizer.bos_token_id == 4 and tokenizer.eos_token is None
    config = AutoModelForCausalLM.from_pretrained(hub).config
    assert (config.bos_token_id, config.eos_token_id) == (4, 0)


@pytest.mark.parametrize(("end_of_text", "expected"), [(96, 96), (97, 2)])
def test_tokens_are_taken_up_to_the_last_row_of_the_vocabulary(hub, end_of_text, expected):
    tokenizer_json(hub, words=98, end_of_text=end_of_text)
    assert AutoModelForCausalLM.from_pretrained(hub).config.eos_token_id == expected


def test_agreeing_tokenizer_is_not_mentioned(hub, logged):
    tokenizer_json(hub)
    change_config(hub, bos_token_id=None, eos_token_id=[5, 0])
    model = AutoModelForCausalLM.from_pretrained(hub)
    assert model.config.eos_token_id == [5, 0] and model.config.bos_token_id == 0
    assert logged() == []


def test_generation_settings(hub, logged):
    """A generation_config.json has the same wrong ids; one that the caller gives is the caller's."""
    tokenizer_json(hub)
    GenerationConfig(bos_token_id=1, eos_token_id=2, do_sample=True, top_k=7).save_pretrained(hub)
    model = AutoModelForCausalLM.from_pretrained(hub)
    assert (model.generation_config.eos_token_id, model.generation_config.top_k) == (0, 7)
    assert len(logged()) == 1
    given = GenerationConfig(eos_token_id=9)
    model = AutoModelForCausalLM.from_pretrained(hub, generation_config=given)
    assert (model.generation_config.eos_token_id, model.config.eos_token_id) == (9, 0)


@pytest.mark.parametrize("broken", ["none", "damaged", "too large", "no special tokens"])
def test_nothing_to_learn_from_the_tokenizer(hub, broken, logged):
    if broken == "damaged":
        (hub / "tokenizer.json").write_text("{")
        (hub / "tokenizer_config.json").write_text("{")
    elif broken == "too large":
        tokenizer_json(hub, words=200, end_of_text=199)
    elif broken == "no special tokens":
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        tokenizer.save(str(hub / "tokenizer.json"))
        (hub / "tokenizer_config.json").write_text("[")
        assert tokenizer_special_ids(hub, {}) == {}
    model = AutoModelForCausalLM.from_pretrained(hub)
    assert (model.config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    assert logged() == []


def test_native_folders_keep_their_ids(tmp_path, logged):
    """Only the authors' configurations are mistrusted."""
    native_model(bos_token_id=5, eos_token_id=6).save_pretrained(tmp_path)
    tokenizer_json(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (6, 6)
    assert logged() == []


def test_pipeline(hub):
    tokenizer_json(hub, words=97)
    generate = pipeline("text-generation", model=str(hub))
    (answer,) = generate("w5 w7 w9", max_new_tokens=4, do_sample=False)
    assert answer["generated_text"].startswith("w5 w7 w9")


# --- errors -----------------------------------------------------------------------------------------------------------


class _RunsACommand:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("files", ["zip", "old", "shard"])
def test_code_in_a_pickle_is_not_run(hub, tmp_path, files):
    name = "pytorch_model.bin"
    if files == "shard":
        name = "pytorch_model-00002-of-00002.bin"
        write_weights(hub, torch.load(hub / "pytorch_model.bin"), "sharded.bin")
        (hub / "pytorch_model.bin").unlink()
    harmful = {"tok_embeddings.weight": _RunsACommand(tmp_path / "made")}
    torch.save(harmful, hub / name, _use_new_zipfile_serialization=files != "old")
    with pytest.raises(OSError, match=rf"{name} holds more than tensors: it would run .*mkdir.*safetensors"):
        AutoModelForCausalLM.from_pretrained(hub)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("keep", [0, 3, 4, 100, 0.5, 0.999, -1])
def test_truncated_bin(hub, keep):
    file = hub / "pytorch_model.bin"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(OSError, match=r"pytorch_model\.bin is damaged.*copy or download it again"):
        AutoModelForCausalLM.from_pretrained(hub)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"[1, 2]"])
def test_something_else_instead_of_a_bin(hub, content):
    (hub / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(OSError, match=r"pytorch_model\.bin is damaged, or no file of torch\.save"):
        AutoModelForCausalLM.from_pretrained(hub)
    torch.save([torch.zeros(2)], hub / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model\.bin holds a list"):
        AutoModelForCausalLM.from_pretrained(hub)


def test_damaged_shards(hub):
    tensors = torch.load(hub / "pytorch_model.bin")
    (hub / "pytorch_model.bin").unlink()
    write_weights(hub, tensors, "sharded.safetensors")
    shard = hub / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match=r"model-00002-of-00002\.safetensors is damaged or truncated"):
        AutoModelForCausalLM.from_pretrained(hub)
    shard.unlink()
    with pytest.raises(OSError, match=r"model-00002-of-00002\.safetensors does not exist, but .*index\.json names it"):
        AutoModelForCausalLM.from_pretrained(hub)
    (hub / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(OSError, match=r"index\.json is damaged"):
        AutoModelForCausalLM.from_pretrained(hub)


def test_code_beside_a_native_configuration_is_not_run(hub, tmp_path):
    """The library's own refusal, with the file's name."""
    tiny_config().save_pretrained(hub)
    torch.save({"tok_embeddings.weight": _RunsACommand(tmp_path / "made")}, hub / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model\.bin holds more than tensors: it would run \w+\.mkdir") as caught:
        AutoModelForCausalLM.from_pretrained(hub)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not (tmp_path / "made").exists()


def test_no_weights(hub):
    (hub / "pytorch_model.bin").unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):  # the library's own
        AutoModelForCausalLM.from_pretrained(hub)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"n_head": 8}, r"self_attn\.o_proj\.weight.*MISMATCH.*32, 32.*32, 64"),
        ({"n_head": 8, "head_dim": 4}, r"attention\.wqkv\.weight with shape \(64, 32\).*asks for \(48, 32\)"),
        ({"n_head": 2, "n_local_heads": 1, "head_dim": 16}, r"q_norm\.weight.*MISMATCH.*8.*16"),
        ({"dim": 48}, r"embed_tokens\.weight.*MISMATCH.*97, 32.*97, 48"),
        ({"intermediate_size": 80}, r"down_proj\.weight.*MISMATCH.*32, 64.*32, 80"),
        ({"vocab_size": 99}, r"embed_tokens\.weight.*MISMATCH.*97, 32.*99, 32"),
    ],
    ids=["n_head", "thinner heads", "fewer heads", "dim", "intermediate_size", "vocab_size"],
)
def test_shapes_that_do_not_fit(hub, keys, named, logged):
    change_config(hub, **keys)
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes|conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(hub)
    assert re.search(named, "\n".join(logged()))


def test_shapes_that_do_not_fit_a_native_configuration(hub, logged):
    """Transformers reports what the conversion says."""
    model = native_model(num_key_value_heads=4)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        DCFormerForCausalLM.from_pretrained(hub, config=model.config)
    expected = "layers.0.attention.wqkv.weight with shape (64, 32), the configuration asks for (96, 32)"
    assert expected in logged()[-1].replace("layers.1", "layers.0")


def test_mismatched_sizes_can_be_ignored(hub):
    change_config(hub, vocab_size=99)
    model, info = AutoModelForCausalLM.from_pretrained(hub, ignore_mismatched_sizes=True, output_loading_info=True)
    assert {name for name, *_ in info["mismatched_keys"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert model.model.embed_tokens.weight.shape == (99, 32)


@pytest.mark.parametrize(
    "argument",
    [{"tp_plan": "auto"}, {"tp_size": 2}, {"device_mesh": object()}],
    ids=["tp_plan", "tp_size", "device_mesh"],
)
@pytest.mark.parametrize("files", ["pytorch_model.bin", "sharded.safetensors"])
def test_tensor_parallelism_is_refused(tmp_path, argument, files):
    write_folder(tmp_path, native_model(), files=files)
    with pytest.raises(ValueError, match=r"dcformer-convert hub-to-safetensors --checkpoint .* --output"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **argument)


def test_native_tensors_beside_an_authors_configuration(tmp_path, logged):
    model = native_model()
    write_folder(tmp_path, model)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(loaded, model)
    given = {}

    def load(path, **arguments):
        given.update(arguments)
        return model, {"missing_keys": set(), "unexpected_keys": set()}

    config = AutoConfig.from_pretrained(tmp_path)
    load_hub_folder(load, tmp_path, config=config, tp_plan="auto")  # not refused
    assert isinstance(given["config"], DCFormerConfig) and given["tp_plan"] == "auto"
    assert logged() == []
