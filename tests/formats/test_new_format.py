"""A format of one file, the example of CONTRIBUTING.md: found, inferred, read, written, converted and compared."""

import ast
import re

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, randomize, tiny_config

from dcformer import DCFormerForCausalLM
from dcformer.conversion import (
    ConversionError,
    compare_tensors,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    open_checkpoint,
)
from dcformer.formats import FORMATS, array_formats

tensorstore = pytest.importorskip("tensorstore", reason="JAX checkpoints need tensorstore: pip install 'dcformer[jax]'")
QUIET = {"progress": False}
NAMES = tuple(FORMATS)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    """The example, registered."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    marked = r"<!-- tests/formats/test_new_format.py runs this -->\n```python\n(.*?)^```"
    (source,) = re.findall(marked, text, re.DOTALL | re.MULTILINE)
    scope: dict = {}
    exec(source, scope)
    format = scope["FlatFormat"]()
    monkeypatch.setitem(FORMATS, format.name, format)
    return format


@pytest.fixture
def native(tmp_path):
    config = tiny_config(num_hidden_layers=4, layer_pattern="LGLL", norm_eps=1e-6, compose_rank=3, compose_groups=2)
    randomize(DCFormerForCausalLM(config)).save_pretrained(tmp_path / "native")
    return tmp_path / "native"


def test_round_trip(native, tmp_path):
    report = convert_safetensors_to_jax(native, tmp_path / "flat", format="flat", step=7, **QUIET)
    assert (report.source_format, report.output_format) == ("native", "flat")
    opened = open_checkpoint(tmp_path / "flat")
    assert (opened.format, opened.step, opened.is_folder) == ("flat", 7, False)
    convert_jax_to_safetensors(tmp_path / "flat", tmp_path / "back", **QUIET)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (native / name).read_bytes(), name


def test_what_is_stored(native, tmp_path):
    """Names and dimensions are the table's, read without the package."""
    convert_safetensors_to_jax(native, tmp_path / "flat", format="flat", **QUIET)
    place = tmp_path / "flat" / "0" / "params.net.layer2.q"
    stored = tensorstore.open({"driver": "zarr", "kvstore": f"file://{place.resolve()}/"}).result().read().result()
    q_proj = open_checkpoint(native).read("model.layers.2.self_attn.q_proj.weight")
    np.testing.assert_array_equal(stored, q_proj.T.reshape(32, 4, 8).numpy())


def test_the_configuration_is_inferred(native, tmp_path):
    convert_safetensors_to_jax(native, tmp_path / "flat", format="flat", **QUIET)
    (tmp_path / "flat" / "config.json").unlink()
    opened = open_checkpoint(tmp_path / "flat", config={"sliding_window": 8})
    expected, found = open_checkpoint(native).config, opened.config
    names = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
    names += ["intermediate_size", "compose_rank", "compose_groups", "qk_norm", "layer_types", "norm_eps", "mlp_type"]
    assert {name: getattr(found, name) for name in names} == {name: getattr(expected, name) for name in names}
    assert "assumed norm_eps = 1e-06" in opened.notes
    assert all(torch.equal(tensor, opened.read(name)) for name, tensor in open_checkpoint(native).tensors())


def test_to_other_formats_and_back(native, tmp_path):
    convert_safetensors_to_jax(native, tmp_path / "flat", format="flat", **QUIET)
    convert_safetensors_to_jax(tmp_path / "flat", tmp_path / "pax", format="pax", **QUIET)
    convert_safetensors_to_jax(tmp_path / "pax", tmp_path / "again", format="flat", **QUIET)
    comparisons = compare_tensors(open_checkpoint(tmp_path / "flat"), open_checkpoint(tmp_path / "again"), **QUIET)
    assert len(comparisons) > 50 and all(comparison.is_equal for comparison in comparisons)


def test_what_does_not_fit_is_refused(native, tmp_path):
    convert_safetensors_to_jax(native, tmp_path / "flat", format="flat", **QUIET)
    with pytest.raises(ConversionError, match="--ocdbt is for MaxText"):
        convert_safetensors_to_jax(native, tmp_path / "other", format="flat", ocdbt=True, **QUIET)
    with pytest.raises(ConversionError, match="no parameters of a maxtext checkpoint"):
        open_checkpoint(tmp_path / "flat", "maxtext")
    DCFormerForCausalLM(tiny_config(attention_bias=True)).save_pretrained(tmp_path / "biased")
    with pytest.raises(ConversionError, match=r"flat checkpoint has no place for 8 .*\.bias"):
        convert_safetensors_to_jax(tmp_path / "biased", tmp_path / "other", format="flat", **QUIET)


def test_the_engine_names_no_format():
    """What is special about a format is in its module: names and options of trainers nowhere else, docstrings included.

    Words of the command line and "ocdbt", a driver of TensorStore's, are not names of formats.
    """
    options = set().union(*(format.options for format in array_formats())) - {"ocdbt"}
    trainers = "|".join(["maxtext", "pax", *(re.sub("[-_]", "[-_]", option) for option in options)])
    for path in (REPOSITORY / "src" / "dcformer" / "conversion").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not (found := re.search(trainers, text, re.IGNORECASE)), (path, found)
        tree = ast.parse(text)
        docstrings = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, DOCUMENTED)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
                words = re.findall(r"[\w-]+", node.value)
                assert not set(words) & set(NAMES), f"{path}:{node.lineno}: {node.value}"
