"""What composition costs in the cache: the table of `python -m dcformer.cache_report`."""

import re
import subprocess
import sys

import pytest
import torch
from helpers import tiny_config
from transformers import DynamicCache

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.cache_report import PRESETS, cache_bytes_per_token, main, measured_bytes_per_layer, report

LIMITS = {128: 0.07, 80: 0.11}  # overhead allowed at a head dim, for rank 2 and as many key/value heads as heads


@pytest.mark.parametrize("name", PRESETS)
def test_overhead_of_the_presets(name):
    config = DCFormerConfig.from_preset(name)
    plain, composed = cache_bytes_per_token(config)
    assert plain == 2 * 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    if config.head_dim in LIMITS:
        assert plain < composed <= (1 + LIMITS[config.head_dim]) * plain
    assert composed == measured_bytes_per_layer(config) * config.num_hidden_layers


def test_all_presets_are_reported():
    with pytest.raises(ValueError, match="expected one of") as error:
        DCFormerConfig.from_preset("?")
    assert sorted(PRESETS) == sorted(re.findall(r"'(dc[^']*)'", str(error.value)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 1, "compose_rank": 3},
        {"compose_post": False},
        {"compose_key": False},
        {"compose_projection": False},
    ],
)
def test_counted_bytes_are_those_of_a_generating_model(fields, dtype):
    config = tiny_config(**fields)
    model = DCFormerForCausalLM(config).to(dtype)
    cache, length = DynamicCache(config=config), 5  # within the window
    model(torch.ones(1, length, dtype=torch.long), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == length * cache_bytes_per_token(config, dtype)[1]
    assert measured_bytes_per_layer(config, dtype) * 2 * length == held


def test_plain_transformer_has_no_overhead():
    off = {name: False for name in ("compose_pre", "compose_post", "compose_query", "compose_key")}
    plain, composed = cache_bytes_per_token(tiny_config(**off))
    assert plain == composed


def test_command_line(capsys):
    main(["dcformer-6.9b", "dcpythia-2.8b", "--dtype", "float32"])
    heading, columns, *rows = capsys.readouterr().out.splitlines()
    assert "float32" in heading
    assert "overhead" in columns
    assert [row.split() for row in rows] == [
        ["dcformer-6.9b", "128", "1048576", "1114112", "6.25%", "34816"],
        ["dcpythia-2.8b", "80", "655360", "720896", "10.00%", "22528"],
    ]
    with pytest.raises(SystemExit):
        main(["dcformer-7b"])
    assert "unknown preset 'dcformer-7b'" in capsys.readouterr().err


@pytest.mark.slow
def test_command():
    command = [sys.executable, "-m", "dcformer.cache_report", "dcformer-405m"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == report(["dcformer-405m"])
