"""Published sizes, and their table in docs/configuration.md."""

import pytest
from helpers import documented_rows

from dcformer import DCFormerConfig, DCPythiaConfig
from dcformer.analysis import num_compose_parameters, num_parameters
from dcformer.presets_dcformer import PRESETS

L, G = "sliding_attention", "full_attention"
PUBLISHED = (  # name, layers, E, H, D, F: dcmha.md "Sizes" and, for the 8B, its published configuration
    ("dcformer-405m", 24, 1024, 16, 64, 2816),
    ("dcformer-834m", 24, 1536, 24, 64, 4096),
    ("dcformer-1.4b", 24, 2048, 32, 64, 5632),
    ("dcformer-2.8b", 32, 2560, 32, 80, 6912),
    ("dcformer-6.9b", 32, 4096, 32, 128, 11008),
    ("dcformer-13b", 40, 5120, 40, 128, 13824),
    ("dcformer-33b", 60, 6656, 52, 128, 17920),
    ("dcformer-8b-mgate", 48, 4096, 32, 128, 5632),
    ("dcpythia-2.8b", 32, 2560, 32, 80, 10240),
    ("dcpythia-6.9b", 32, 4096, 32, 128, 16384),
)


@pytest.mark.parametrize("preset", PUBLISHED, ids=lambda preset: preset[0])
def test_presets_are_the_published_sizes(preset):
    name, layers, hidden, heads, head_dim, intermediate = preset
    config = DCFormerConfig.from_preset(name)
    assert type(config) is (DCPythiaConfig if name.startswith("dcpythia") else DCFormerConfig)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    assert (*sizes, config.intermediate_size) == (layers, hidden, heads, head_dim, intermediate)
    assert config.num_key_value_heads == heads


def test_presets_of_published_pytorch_checkpoints():
    mgate = DCFormerConfig.from_preset("dcformer-8b-mgate")
    assert (mgate.vocab_size, mgate.max_position_embeddings, mgate.mlp_gates) == (152064, 4096, 44)
    assert mgate.rope_parameters["rope_theta"] == 500000.0
    assert mgate.layer_types[:4] == [L, G, L, L]
    for name in ("dcformer-2.8b", "dcformer-8b-mgate", "dcpythia-6.9b"):
        config = DCFormerConfig.from_preset(name)
        assert (config.compose_act, config.qk_norm_eps) == ("gelu", 1e-6)
    assert DCFormerConfig.from_preset("dcformer-2.8b").norm_eps == 1e-6
    assert DCFormerConfig.from_preset("dcpythia-6.9b").norm_eps == 1e-5


def test_preset_overrides_and_unknown_names():
    config = DCFormerConfig.from_preset("dcformer-8b-mgate", num_hidden_layers=3, compose_rank=1, norm_eps=1e-3)
    assert (config.layer_types, config.compose_rank, config.norm_eps) == ([L, G, L], 1, 1e-3)
    with pytest.raises(ValueError, match=r"'dcformer-7b'.*dcformer-6\.9b.*dcpythia-2\.8b"):
        DCFormerConfig.from_preset("dcformer-7b")


def test_a_configuration_leaves_its_preset_alone():
    before = repr(PRESETS)
    config = DCFormerConfig.from_preset("dcformer-8b-mgate")
    config.rope_parameters["rope_theta"] = 1.0
    assert repr(PRESETS) == before


def test_the_reference_lists_the_presets_and_their_counts():
    documented = {}
    for name, *cells in documented_rows("Presets"):
        documented[name.strip("`")] = tuple(int(cell.replace(",", "")) for cell in cells)
    for name, *sizes in PUBLISHED:
        config = DCFormerConfig.from_preset(name)
        assert documented.pop(name) == (*sizes, num_parameters(config), num_compose_parameters(config))
    assert not documented
