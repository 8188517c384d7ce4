"""Published sizes, and their table in docs/configuration.md."""

import pytest
from helpers import documented_rows

from dcformer import DCFormerConfig, DCPythiaConfig
from dcformer.analysis import num_compose_parameters, num_parameters
from dcformer.presets_dcformer import PRESETS

L, G = "sliding_attention", "full_attention"


def test_preset_overrides_and_unknown_names():
    config = DCFormerConfig.from_preset("dcformer-8b-mgate", num_hidden_layers=3, compose_rank=1, norm_eps=1e-3)
    assert (config.layer_types, config.compose_rank, config.norm_eps) == ([L, G, L], 1, 1e-3)
    with pytest.raises(ValueError, match=r"'dcformer-7b'.*dcformer-6\.9b.*dcpythia-2\.8b"):
        DCFormerConfig.from_preset("dcformer-7b")


class OwnConfig(DCFormerConfig):
    model_type = "dcformer_own"


def test_a_preset_is_of_the_class_that_is_asked():
    assert type(OwnConfig.from_preset("dcformer-405m")) is OwnConfig
    assert type(DCFormerConfig.from_preset("dcpythia-2.8b")) is DCPythiaConfig
    for config_class, name in ((OwnConfig, "dcpythia-2.8b"), (DCPythiaConfig, "dcformer-405m")):
        with pytest.raises(ValueError, match=f"Preset '{name}' is not of {config_class.__name__}: use DC"):
            config_class.from_preset(name)


def test_a_configuration_leaves_its_preset_alone():
    before = repr(PRESETS)
    config = DCFormerConfig.from_preset("dcformer-8b-mgate")
    config.rope_parameters["rope_theta"] = 1.0
    assert repr(PRESETS) == before


def test_the_reference_lists_the_presets_and_their_counts():
    documented = {
        name.strip("`"): [*(int(cell.replace(",", "")) for cell in cells), share]
        for name, *cells, share in documented_rows("Presets")
    }
    for name in PRESETS:
        config = DCFormerConfig.from_preset(name)
        assert type(config) is (DCPythiaConfig if name.startswith("dcpythia") else DCFormerConfig)
        sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim)
        counts = whole, composition = num_parameters(config), num_compose_parameters(config)
        added = f"+{100 * composition / (whole - composition):.1f} %"
        assert documented.pop(name) == [*sizes, config.intermediate_size, *counts, added]
    assert not documented
