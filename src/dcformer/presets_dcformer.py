"""Published sizes of DCFormer and DCPythia: the fields of each that are not the configuration's defaults.

Sources: arXiv 2405.08553, section 4 and its tables; the training configurations published beside it; the configurations
of the authors' PyTorch repositories.
"""

from typing import Any


def _sizes(layers: int, hidden: int, heads: int, head_dim: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
    }


# The sizes released as PyTorch checkpoints use the erf GELU; those trained in JAX use its tanh approximation.
_PYTORCH = {"qk_norm_eps": 1e-6, "compose_act": "gelu"}

# Names that start with "dcpythia" are sizes of `DCPythiaConfig`, the others of `DCFormerConfig`.
PRESETS: dict[str, dict[str, Any]] = {
    "dcformer-405m": _sizes(24, 1024, 16, 64, 2816),
    "dcformer-834m": _sizes(24, 1536, 24, 64, 4096),
    "dcformer-1.4b": _sizes(24, 2048, 32, 64, 5632),
    "dcformer-2.8b": _sizes(32, 2560, 32, 80, 6912) | _PYTORCH | {"norm_eps": 1e-6},
    "dcformer-6.9b": _sizes(32, 4096, 32, 128, 11008),
    "dcformer-13b": _sizes(40, 5120, 40, 128, 13824),
    "dcformer-33b": _sizes(60, 6656, 52, 128, 17920),
    "dcformer-8b-mgate": _sizes(48, 4096, 32, 128, 5632)
    | _PYTORCH
    | {
        "norm_eps": 1e-6,
        "vocab_size": 152064,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "layer_pattern": "LGLL",
        "mlp_gates": 44,
    },
    "dcpythia-2.8b": _sizes(32, 2560, 32, 80, 10240),
    "dcpythia-6.9b": _sizes(32, 4096, 32, 128, 16384) | _PYTORCH,
}

__all__ = ["PRESETS"]
