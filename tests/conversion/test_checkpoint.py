"""Damaged, incomplete and foreign checkpoints are refused with an error that says why, and leave no output."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from helpers import authors_folder, tiny_config
from jax_reference import random_maxtext_params, random_pax_params
from jax_stores import write_arrays, write_maxtext, write_pax
from safetensors.torch import load_file, save_file

from dcformer import DCFormerForCausalLM, HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.conversion import (
    ConversionError,
    convert_hub_to_safetensors,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    open_checkpoint,
)

QUERY = "decoder.layers.self_attention_0.query.kernel"
QKW = "decoder.layers.self_attention_1.AttentionOp_0.dyn_w_proj.qkw"


@pytest.fixture
def params():
    return random_maxtext_params(seed=1)


def refuse(path, tmp_path, match, **options):
    """Converting fails with this message and leaves nothing."""
    output = tmp_path / "out" / "native"
    with pytest.raises(ConversionError, match=match):
        convert_jax_to_safetensors(path, output, progress=False, **options)
    assert not output.exists()
    assert not output.parent.exists() or not list(output.parent.iterdir())


def chunk_of(folder, name):
    (chunk,) = [file for file in (folder / f"params.{name}").iterdir() if file.name != ".zarray"]
    return chunk


@pytest.mark.parametrize("name", [QUERY, QKW, "token_embedder.embedding"])
def test_truncated_chunk(params, name, tmp_path):
    folder = write_maxtext(tmp_path / "state", params)
    chunk = chunk_of(folder, name)
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    refuse(folder, tmp_path, f"params.{name}.*truncated")


def test_flipped_bytes_in_a_chunk(params, tmp_path):
    folder = write_maxtext(tmp_path / "state", params)
    chunk = chunk_of(folder, QUERY)
    chunk.write_bytes(b"\0" * chunk.stat().st_size)
    refuse(folder, tmp_path, f"params.{QUERY}")


def test_lost_chunk(params, tmp_path):
    folder = write_maxtext(tmp_path / "state", params)
    chunk_of(folder, QUERY).unlink()
    refuse(folder, tmp_path, f"params.{QUERY} lacks 1 of its 1 chunks")


def test_damaged_array_metadata(params, tmp_path):
    folder = write_maxtext(tmp_path / "state", params)
    (folder / f"params.{QUERY}" / ".zarray").write_text('{"shape": [3')
    refuse(folder, tmp_path, f"params.{QUERY} is damaged")


def test_truncated_ocdbt(params, tmp_path):
    folder = write_maxtext(tmp_path / "state", params, ocdbt=True)
    for file in (folder / "d").iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    refuse(folder, tmp_path, "cannot be listed|is damaged|cannot be read")


@pytest.mark.parametrize(
    "name", ["decoder.decoder_norm.scale", QUERY, "decoder.layers.mlp_1.wo.kernel", QKW, "token_embedder.embedding"]
)
def test_missing_array(params, name, tmp_path):
    del params[name]
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, "lacks|only one is stored|twice|incomplete")


def test_missing_array_is_named(params, tmp_path):
    del params["decoder.layers.mlp_1.wo.kernel"]
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, r"lacks 1 of the .* decoder\.layers\.mlp_1\.wo\.kernel")


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.bool_, np.complex64])
def test_wrong_dtype(params, dtype, tmp_path):
    params[QUERY] = params[QUERY].astype(dtype)
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, f"{QUERY} as {np.dtype(dtype).name}")


def test_extra_layer_in_one_stack(params, tmp_path):
    params[QUERY] = np.concatenate([params[QUERY]] * 2, axis=1)
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, "layers per stack is")


def test_extra_layer_against_the_configuration(params, tmp_path):
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, "num_hidden_layers=3, the checkpoint shows 4", config={"num_hidden_layers": 3})


def test_part_of_an_extra_layer(params, tmp_path):
    extra = "decoder.layers.mlp_2.wi_0.kernel"
    params[extra] = params["decoder.layers.mlp_0.wi_0.kernel"]
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, "lacks .* tensors of this model")


def test_unknown_array(params, tmp_path):
    params["decoder.layers.self_attention_0.sink.kernel"] = np.ones((4, 2), np.float32)
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, r"does not have: .*sink\.kernel")


def test_unknown_arrays_under_unknown_names(params, tmp_path):
    """Learned positions, for one, are parameters and no state of an optimizer."""
    params["position_embedder.embedding"] = np.ones((8, 32), np.float32)
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, r"does not have: position_embedder\.embedding")
    params = random_pax_params(seed=1)
    params["position_emb.emb_var"] = np.ones((8, 32), np.float32)
    refuse(write_pax(tmp_path / "pax", params), tmp_path, r"does not have: position_emb\.emb_var")


@pytest.mark.parametrize("is_same", [True, False])
def test_a_head_of_its_own_in_a_model_that_is_to_have_none(is_same, tmp_path):
    model = DCFormerForCausalLM(tiny_config(tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "native")
    file = tmp_path / "native" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding + (0 if is_same else 1)}, file, {"format": "pt"})
    if is_same:
        assert open_checkpoint(tmp_path / "native").config.tie_word_embeddings
    else:
        with pytest.raises(ConversionError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
            open_checkpoint(tmp_path / "native")


@pytest.mark.parametrize("period", [1, 4])
def test_wrong_period(params, period, tmp_path):
    (tmp_path / "config.yml").write_text(f"num_layers_per_block: {period}\n")
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, f"has {period} layers per block, the checkpoint 2", config=tmp_path / "config.yml")


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        (QUERY, (32, 2, 4, 9), "head dim is 9"),
        (QUERY, (32, 2, 32), "expected 4 dimensions"),
        ("decoder.logits_dense.kernel", (33, 97), "hidden size is 3"),
        ("decoder.logits_dense.kernel", (32, 98), "expected .*98"),
        (QKW, (1, 2, 4, 16, 6, 4), "fit no composition|does not fit"),
        ("decoder.decoder_norm.scale", (31,), "hidden size is 3"),
    ],
)
def test_wrong_shape(params, name, shape, match, tmp_path):
    params[name] = np.zeros(shape, params[name].dtype)
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, match)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values(params, value, tmp_path):
    params[QUERY][3, 1, 2, 1] = value
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, r"layers\.2\.self_attn\.q_proj\.weight holds 1 values .*--allow-nonfinite")
    report = convert_jax_to_safetensors(folder, tmp_path / "kept", allow_nonfinite=True, progress=False)
    assert "layers.2.self_attn.q_proj.weight holds 1 values" in str(report)
    kept = open_checkpoint(tmp_path / "kept").read("model.layers.2.self_attn.q_proj.weight")
    assert (~kept.isfinite()).sum() == 1


def test_overflow_in_a_narrower_dtype(params, tmp_path):
    params[QUERY][0, 0, 0, 0] = 1e6
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, "infinite as float16", dtype="float16")


def test_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hello")
    (tmp_path / "file").write_text("hello")
    refuse(tmp_path / "nowhere", tmp_path, "nowhere does not exist")
    refuse(tmp_path / "file", tmp_path, "is a file")
    refuse(tmp_path / "empty", tmp_path, "is not a JAX checkpoint.*It holds nothing")
    refuse(tmp_path / "other", tmp_path, "is not a JAX checkpoint.*notes.txt")
    write_arrays(tmp_path / "foreign", {"params.encoder.w": np.ones(3, np.float32)})
    refuse(tmp_path / "foreign", tmp_path, "is not a JAX checkpoint")
    refuse("nosuch://bucket/path", tmp_path, "cannot be listed")


def test_lost_chunk_of_orbax_zarr3(params, tmp_path):
    """Orbax stores every chunk, also where zarr lets a missing one stand for the fill value."""
    folder = write_maxtext(tmp_path / "state", params, driver="zarr3")
    (folder / "_METADATA").write_text("{}")
    shutil.rmtree(folder / f"params.{QUERY}" / "c")
    refuse(folder, tmp_path, f"params.{QUERY} lacks 1 of its 1 chunks")


def test_missing_head_is_not_taken_for_tied_embeddings(params, tmp_path):
    del params["decoder.logits_dense.kernel"]
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, r"decoder\.logits_dense\.kernel.*tie_word_embeddings")


@pytest.mark.parametrize(
    "config", [{"layer_pattern": "LGLL"}, {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}]
)
def test_layers_that_do_not_repeat_as_blocks_do(params, config, tmp_path):
    refuse(write_maxtext(tmp_path / "state", params), tmp_path, "do not repeat after 2", config=config)


def test_outputs_elsewhere_and_inside_the_source(params, tmp_path):
    root = tmp_path / "run"
    write_maxtext(root / "20" / "state", params)
    with pytest.raises(ConversionError, match="is not a local folder"):
        convert_jax_to_safetensors(root, "gs://bucket/x", progress=False)
    for output in (root, root / "20", root / "20" / "state"):
        with pytest.raises(ConversionError, match=r"holds the checkpoint to convert"):
            convert_jax_to_safetensors(root, output, overwrite=True, progress=False)
    assert open_checkpoint(root).step == 20


@pytest.mark.parametrize("name", ["a b", "a#b", "a%20b", "a?b", "ä"])
def test_odd_folder_names(params, name, tmp_path):
    write_maxtext(tmp_path / name / "3" / "state", params)
    convert_jax_to_safetensors(tmp_path / name, tmp_path / "out", progress=False)
    assert open_checkpoint(tmp_path / "out").shapes


def test_steps_without_arrays_are_named(params, tmp_path):
    write_maxtext(tmp_path / "10" / "state", params)
    (tmp_path / "20" / "state").mkdir(parents=True)
    assert "steps without arrays, skipped: 20" in open_checkpoint(tmp_path).notes


def test_wrong_format(params, tmp_path):
    folder = write_maxtext(tmp_path / "state", params)
    refuse(folder, tmp_path, "no parameters of a pax checkpoint", format="pax")
    refuse(folder, tmp_path, "format='flax' is unknown", format="flax")
    pax = write_pax(tmp_path / "pax" / "state", random_pax_params(seed=1))
    refuse(pax, tmp_path, "no parameters of a maxtext checkpoint", format="maxtext")


def test_a_model_folder_is_not_a_jax_checkpoint(tmp_path):
    DCFormerForCausalLM(tiny_config()).save_pretrained(tmp_path / "model")
    refuse(tmp_path / "model", tmp_path, "is a model folder, not a JAX checkpoint")


# --- model folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def native(tmp_path):
    DCFormerForCausalLM(tiny_config()).save_pretrained(tmp_path / "native", max_shard_size="20KB")
    return tmp_path / "native"


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def test_damaged_safetensors(native):
    assert len(shards(native)) > 1
    file = shards(native)[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConversionError, match=f"{file.name} is damaged or truncated"):
        open_checkpoint(native)


def test_missing_shard(native):
    shards(native)[1].unlink()
    with pytest.raises(ConversionError, match=r"00002-of.* does not exist, but .*index\.json names it"):
        open_checkpoint(native)


def test_damaged_index(native):
    (native / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"index\.json is damaged"):
        open_checkpoint(native)


def test_damaged_config(native):
    (native / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"config\.json"):
        open_checkpoint(native)


def test_a_config_of_no_type(native):
    content = json.loads((native / "config.json").read_text())
    (native / "config.json").write_text(json.dumps({key: content[key] for key in content if key != "model_type"}))
    with pytest.raises(ConversionError, match=r"config\.json is not a valid .*no model_type: expected dcformer, dcp"):
        open_checkpoint(native)


def test_foreign_config(native):
    (native / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConversionError, match="model_type 'llama', expected dcformer, dcpythia or dha"):
        open_checkpoint(native)


@pytest.mark.parametrize("system", ["plain", "overlapped", "mixture_of_heads"])
def test_models_with_a_head_system(system, tmp_path):
    """They are whole, and of a kind that is not converted."""
    config = HeadSystemsConfig(**tiny_config(num_key_value_heads=4).to_dict(), head_system=system)
    HeadSystemsForCausalLM(config).save_pretrained(tmp_path / "native")
    with pytest.raises(ConversionError, match="with a head system"):
        convert_safetensors_to_jax(tmp_path / "native", tmp_path / "out", format="pax", progress=False)
    assert not (tmp_path / "out").exists()


def test_config_of_another_size(native):
    config = json.loads((native / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (native / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"does not have: model\.layers\.1\."):
        open_checkpoint(native)


class _Payload:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_pickle_with_code(how, tmp_path):
    folder = authors_folder(tmp_path / "hub")
    content = {"tok_embeddings.weight": torch.zeros(3), "x": _Payload(str(tmp_path / "pwned"))}
    if how == "torch.save":
        torch.save(content, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ConversionError, match="would run"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "out").exists()


def test_sparse_tensors(tmp_path):
    folder = authors_folder(tmp_path / "hub")
    tensors = torch.load(folder / "pytorch_model.bin")
    torch.save(tensors | {"norm.weight": tensors["norm.weight"].to_sparse()}, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"holds norm\.weight as a sparse tensor: store it with to_dense"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)


def test_truncated_bin(tmp_path):
    folder = authors_folder(tmp_path / "hub")
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_empty_bin(tmp_path):
    folder = authors_folder(tmp_path / "hub")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin is damaged"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)


def test_bin_of_something_else(tmp_path):
    folder = authors_folder(tmp_path / "hub")
    torch.save({"encoder.weight": torch.zeros(3)}, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"neither model\.embed_tokens.*; it holds encoder\.weight"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)


def test_real_static_projections_are_not_dropped(tmp_path):
    """The configuration says that there are none, the tensors are not the identity."""
    folder = authors_folder(tmp_path / "hub")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    state["layers.1.attention.dyn_w_proj.pre_proj.w"] += 0.5
    torch.save(state, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_sw": False}))
    with pytest.raises(ConversionError, match=r"does not have: layers\.0\.attention\.dyn_w_proj\.post_proj\.w"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)
    (folder / "config.json").write_text(json.dumps(config))
    convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)
    assert open_checkpoint(tmp_path / "out").config.compose_static


def test_generation_config_of_the_folder_is_kept(tmp_path):
    folder = authors_folder(tmp_path / "hub")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": True}))
    convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (kept["temperature"], kept["do_sample"], kept["eos_token_id"]) == (0.7, True, 2)


def test_bin_lacks_a_tensor(tmp_path):
    folder = authors_folder(tmp_path / "hub")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del state["layers.2.feed_forward.w2.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"lacks 1 .*layers\.2\.feed_forward\.w2\.weight"):
        convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)


@pytest.mark.parametrize("layer", ["more", "2"])
def test_bin_lacks_a_layer(layer, tmp_path):
    """Fused projections are missed where the other layers have them."""
    folder = authors_folder(tmp_path / "hub")
    if layer == "more":
        config = json.loads((folder / "config.json").read_text())
        layer = config["n_layer"]
        (folder / "config.json").write_text(json.dumps(config | {"n_layer": layer + 1}))
    else:
        state = torch.load(folder / "pytorch_model.bin", weights_only=True)
        del state[f"layers.{layer}.attention.wqkv.weight"]
        torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=rf"lacks .*layers\.{layer}\.attention\.wqkv\.weight") as refusal:
        open_checkpoint(folder)
    assert ".wq." not in str(refusal.value)


@pytest.mark.parametrize("tensor", ["qkw", "dw1", "dd"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_misshapen_tensor_is_named(tensor, layer, tmp_path):
    """Not another one that it does not fit: the rank and the generators are those of most tensors."""
    folder = authors_folder(tmp_path / "hub")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    name = f"layers.{layer}.attention.dyn_w_proj.{tensor}"
    for axis in range(state[name].ndim):
        size = state[name].shape[axis]
        if size > 1:
            cut = {name: state[name].narrow(axis, 0, size - 1)}
            torch.save(state | cut, folder / "pytorch_model.bin")
            with pytest.raises(ConversionError, match=rf"holds {name} with shape .*, expected "):
                open_checkpoint(folder)


def test_old_format_bin(tmp_path):
    """What PyTorch before 1.6 wrote cannot be mapped into memory; it is read all the same."""
    folder = authors_folder(tmp_path / "hub")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert_hub_to_safetensors(folder, tmp_path / "out", progress=False)
    found = open_checkpoint(tmp_path / "out").read("lm_head.weight")
    assert torch.equal(found, state["output.weight"])


def test_config_and_step_are_for_jax(native):
    with pytest.raises(ConversionError, match="--config and --step are for JAX checkpoints"):
        open_checkpoint(native, step=3)
