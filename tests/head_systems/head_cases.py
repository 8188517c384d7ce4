"""Bare attention layers around head systems, and models of every system, for the tests of this folder."""

import torch
from helpers import PLAIN, randomize, tiny_config
from torch import nn

from dcformer.attention_dcformer import eager_attention
from dcformer.head_systems import HeadSizes, HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.head_systems.registry import system_class

# Every system, with options that are not its defaults, by a name for the test.
CASES = {
    "plain": ("plain", {}),
    "talking_heads": ("talking_heads", {}),
    "collaborative": ("collaborative", {}),
    "collaborative_half": ("collaborative", {"shared_key_query_dim": 16, "content_bias": True}),
    "overlapped": ("overlapped", {"overlap": 3}),
    "overlapped_by_depth": ("overlapped", {"overlap": "depth1"}),
    "mixture": ("mixture_of_heads", {"num_shared_heads": 2, "num_routed_heads_per_tok": 1}),
    "mixture_paper": ("mixture_of_heads", {"num_routed_heads_per_tok": 3, "routing_form": "paper"}),
    "mixture_query_norm": (
        "mixture_of_heads",
        {"num_shared_heads": 1, "num_routed_heads_per_tok": 2, "router": "query_norm"},
    ),
    "gate": ("output_gate", {}),
    "gate_elementwise": ("output_gate", {"output_gate": "elementwise", "output_gate_bias": True}),
    "pruning": ("head_pruning", {}),
}
TALKING = {
    "compose_static": True,
    "compose_query": False,
    "compose_key": False,
    "compose_pre": True,
    "compose_post": True,
}


def heads_config(case: str, composed: bool = False, **fields) -> HeadSystemsConfig:
    """A tiny configuration; grouped keys and values where the system has them."""
    name, options = CASES[case]
    switches = TALKING if name == "talking_heads" else {} if composed else PLAIN
    kv_heads = 4 if name == "overlapped" else 2
    base = tiny_config(**({"num_key_value_heads": kv_heads} | switches | fields)).to_dict()
    base.pop("model_type")
    return HeadSystemsConfig(**base, head_system=name, head_system_options=dict(options))


def heads_model(case: str, composed: bool = False, dtype=torch.float64, **fields) -> HeadSystemsForCausalLM:
    """A model of it with parameters away from their initial values, in evaluation."""
    torch.manual_seed(0)
    return randomize(HeadSystemsForCausalLM(heads_config(case, composed, **fields))).to(dtype)


def tokens(rows: int = 2, length: int = 21) -> torch.Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def make_bare(name: str, sizes: HeadSizes, **options):
    """A system with random parameters and the identity for an output projection's input, in float64."""
    torch.manual_seed(0)
    made_class = system_class(name)
    system = made_class(sizes, made_class.options_class.of(options))
    system.init_weights()
    return system.double().eval()


def plain_layer(sizes: HeadSizes) -> dict[str, nn.Linear]:
    """Random projections of plain attention, in float64."""
    torch.manual_seed(1)
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    widths = {"q": (sizes.hidden_size, q), "k": (sizes.hidden_size, kv), "v": (sizes.hidden_size, kv)}
    widths["o"] = (q, sizes.hidden_size)
    made = {name: nn.Linear(*shape, bias=sizes.bias and name != "o").double() for name, shape in widths.items()}
    for linear in made.values():
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if linear.bias is not None:
            nn.init.normal_(linear.bias)
    return made


def converted(name: str, sizes: HeadSizes, layer: dict[str, nn.Linear], **options):
    """A system made from a plain layer, and the weight of its output projection."""
    system = make_bare(name, sizes, **options)
    with torch.no_grad():
        return system, system.from_mha(layer["q"], layer["k"], layer["v"], layer["o"]).clone()


def attend(system, weight, x, visible, turn=lambda states: states, pre=None, post=None):
    """[B, T, E] -> [B, T, E] through a system, without a cache; `visible` is [B or 1, 1, T, T]."""
    raw, key, value = system.project(x, x)
    query, key, value = system.expand(system.position(raw, turn), system.position(key, turn), value)
    z, _ = eager_attention(system, query, key, value, visible, system.scaling, pre=pre, post=post)
    return system.output(z, x, raw).flatten(2) @ weight.T


def by_definition(layer, sizes, x, visible):
    """Plain attention of a layer, spelt out."""
    q, k, v = (layer[name](x).unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2) for name in "qkv")
    k, v = (states.repeat_interleave(sizes.num_heads // sizes.num_kv_heads, dim=1) for states in (k, v))
    scores = (q @ k.mT * sizes.head_dim**-0.5).masked_fill(~visible, float("-inf"))
    return layer["o"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def masks(rows: int, length: int):
    """What queries see: causal and bidirectional, with and without padding at the front of the first row."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    padded = torch.ones(rows, 1, 1, length, dtype=torch.bool)
    padded[0, ..., : length // 3] = False
    keep = torch.eye(length, dtype=torch.bool)  # a padded query sees itself
    everything = torch.ones_like(causal)
    return {
        "causal": causal,
        "bidirectional": everything,
        "causal, padded": (causal & padded) | keep,
        "bidirectional, padded": (everything & padded) | keep,
    }
