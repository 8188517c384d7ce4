"""Bad input: errors name the field, its value and the range."""

import re

import pytest
from head_cases import heads_config, tokens
from helpers import PLAIN

from dcformer import HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.head_systems import HEAD_SYSTEMS, HeadSizes, HeadSystemsViTConfig
from dcformer.head_systems.registry import system_class

DEEP = {"overlap": "depth1"}
BASE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, **PLAIN}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("collab", {}, "head_system='collab' is unknown: expected one of plain, talking_heads, collaborative"),
        ("plain", {"overlap": 1}, "'overlap' is not an option of HeadSystemOptions: expected none"),
        (
            "collaborative",
            {"dims": 8},
            "'dims' is not an option of CollaborativeOptions: expected shared_key_query",
        ),
        ("collaborative", {"shared_key_query_dim": 0}, "shared_key_query_dim=0 must be a whole number from 2 to 32"),
        ("collaborative", {"shared_key_query_dim": 33}, "shared_key_query_dim=33 must be a whole number from 2 to 32"),
        ("collaborative", {"shared_key_query_dim": 15}, "shared_key_query_dim=15 must be even, from 2 to 32: RoPE"),
        ("collaborative", {"shared_key_query_dim": 12}, "shared_key_query_dim=12 must be a multiple of head_dim=8"),
        ("collaborative", {"shared_key_query_dim": 8.0}, "shared_key_query_dim=8.0 must be a whole number"),
        ("collaborative", {"mixing_init": "zeros"}, "mixing_init='zeros': expected 'normal', 'ones' or 'concatenate'"),
        ("collaborative", {"scaling": -1.0}, "scaling=-1.0 must be a number from"),
        ("collaborative", {"scaling": 0}, "scaling=0 must be a number from"),
        ("collaborative", {"content_bias": 3}, "content_bias=3: expected True or False"),
        ("mixture_of_heads", {"output_router_logits": "yes"}, "output_router_logits='yes': expected True or False"),
        ("overlapped", {"overlap": -1}, "overlap=-1 must be a whole number from 0 to 8"),
        ("overlapped", {"overlap": 9}, "overlap=9 must be a whole number from 0 to 8 (head_dim, as only"),
        ("overlapped", {"overlap": [0, 1]}, "overlap=[0, 1] has 2 entries: expected one for each of the 3 layers"),
        ("overlapped", {"overlap": [0, 1, 9]}, "overlap[2]=9 must be a whole number from 0 to 8"),
        ("overlapped", {"overlap": "deep"}, "overlap='deep': expected an integer, a list or one of"),
        ("mixture_of_heads", {"num_shared_heads": 4}, "num_shared_heads=4 must be a whole number from 0 to 3"),
        ("mixture_of_heads", {"num_shared_heads": -1}, "num_shared_heads=-1 must be a whole number from 0 to 3"),
        (
            "mixture_of_heads",
            {"num_shared_heads": 1, "num_routed_heads_per_tok": 4},
            "num_routed_heads_per_tok=4 must be a whole number from 1 to 3",
        ),
        (
            "mixture_of_heads",
            {"num_routed_heads_per_tok": 0},
            "num_routed_heads_per_tok=0 must be a whole number",
        ),
        ("mixture_of_heads", {"router": "mlp"}, "router='mlp': expected one of ('linear', 'query_norm')"),
        ("mixture_of_heads", {"routing_form": "x"}, "routing_form='x': expected one of ('code', 'paper')"),
        ("mixture_of_heads", {"router": "query_norm", "num_shared_heads": 3}, "router='query_norm' with 1 routed head"),
        ("mixture_of_heads", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef=-0.1 must be a number from 0.0"),
        ("output_gate", {"output_gate": "both"}, "output_gate='both': expected 'headwise' or 'elementwise'"),
        ("output_gate", {"output_gate_scale": 0.0}, "output_gate_scale=0.0 must be a number from"),
        ("output_gate", {"output_gate_bias": 1}, "output_gate_bias=1: expected True or False"),
        ("head_pruning", {"l0_penalty": -1.0}, "l0_penalty=-1.0 must be a number from 0.0"),
        ("head_pruning", {"kept_heads": [[0]]}, "kept_heads has 1 lists: expected 3, one a layer"),
        ("head_pruning", {"kept_heads": "all"}, "kept_heads='all': expected a list of heads for each of 3 layers"),
        ("head_pruning", {"kept_heads": [[0], [True], [1]]}, "kept_heads[1]=[True]: expected one or more of 0 to 3"),
        (
            "head_pruning",
            {"kept_heads": [[0], [1.0], [1]]},
            "kept_heads[1]=[1.0]: expected one or more of 0 to 3, integers",
        ),
        ("head_pruning", {"kept_heads": [[0], [], [1]]}, "kept_heads[1]=[]: expected one or more of 0 to 3"),
        ("head_pruning", {"kept_heads": [[0], [1, 0], [1]]}, "kept_heads[1]=[1, 0]: expected one or more of 0 to 3"),
    ],
)
def test_bad_options_are_named(name, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        HeadSystemsConfig(**BASE, head_system=name, head_system_options=options)


def test_an_overlap_that_outgrows_the_heads_is_named_with_its_rule():
    with pytest.raises(ValueError, match=r"^overlap='depth1': overlap\[8\]=9 must be a whole number from 0 to 8 "):
        HeadSystemsConfig(**BASE | {"num_hidden_layers": 9}, head_system="overlapped", head_system_options=DEEP)


@pytest.mark.parametrize(
    ("name", "options", "stored"),
    [
        ("head_pruning", {"kept_heads": ((0, 1), [2], (3,))}, {"kept_heads": [[0, 1], [2], [3]]}),
        ("overlapped", {"overlap": (0, 1, 2)}, {"overlap": [0, 1, 2]}),
    ],
)
def test_options_are_stored_as_json_has_them(name, options, stored):
    """Tuples become lists, also those set later; what was given stays."""
    for config_class in (HeadSystemsConfig, HeadSystemsViTConfig):
        config = config_class(**BASE, head_system=name, head_system_options=options)
        assert config.head_system_options == stored
    config = HeadSystemsConfig(**BASE, head_system=name)
    config.head_system_options = options
    assert config.head_system_options == stored and isinstance(next(iter(options.values())), tuple)
    assert HeadSystemsForCausalLM(config)(tokens()).logits.isfinite().all()


def test_overlapped_heads_are_not_grouped():
    with pytest.raises(ValueError, match="'overlapped' with num_key_value_heads=2 and num_attention_heads=4"):
        HeadSystemsConfig(**BASE, num_key_value_heads=2, head_system="overlapped")


def test_talking_heads_are_static_alone():
    with pytest.raises(ValueError, match=r"compose_query=True, compose_key=True: talking heads.*Set compose_"):
        HeadSystemsConfig(head_system="talking_heads", compose_static=True)


def test_two_gates_of_one_kind_are_named(caplog):
    from transformers.utils import logging

    logging.get_logger("dcformer.head_systems.output_gate").propagate = True
    from dcformer.head_systems import output_gate

    type(output_gate.logger).warning_once.cache_clear()
    heads_config("gate", composed=True)
    assert "output_gate and the query-wise gate of composition" in caplog.text
    caplog.clear()
    type(output_gate.logger).warning_once.cache_clear()
    heads_config("gate")
    heads_config("gate", composed=True, compose_gate=False)
    assert not caplog.text


def test_a_field_broken_later_is_refused():
    config = heads_config("mixture")
    config.head_system_options["num_shared_heads"] = 9
    with pytest.raises(ValueError, match="num_shared_heads=9"):
        config.validate_architecture()


@pytest.mark.parametrize("name", HEAD_SYSTEMS)
def test_systems_know_no_models(name):
    """A system is made from sizes and options, and has the interface of all."""
    made_class = system_class(name)
    system = made_class(HeadSizes(16, 2, 2, 8), made_class.options_class())
    assert system.scaling == 8**-0.5 and system.output_width % 2 == 0 and len(system.cache_widths) == 2


def test_files_are_short():
    """One file per system that can be read alone."""
    from helpers import REPOSITORY

    files = list((REPOSITORY / "src/dcformer/head_systems").glob("*.py"))
    assert len(files) > 10
    assert not {f.name: n for f in files if (n := len(f.read_text(encoding="utf-8").splitlines())) > 150}
