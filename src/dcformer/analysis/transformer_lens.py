"""DCFormer and DCPythia in TransformerLens: its hooks on this package's own forward pass.

TransformerLens finds the adapters by entry point. Its adapter for Llama would compute attention anew, without
composition; these keep the model's attention and only hook it: `hook_z`, `hook_pattern` (composed weights), `hook_q`,
`hook_k`, `hook_v`, `hook_resid_pre`, `hook_resid_mid` and `hook_resid_post`. `hook_attn_scores` has composed weights,
too: scores are those of `trace`. Both of these hooks read and do not edit; edit `hook_z`, or use `ablate`. Weights have
the library's names.
Written for TransformerLens 4.3.
"""

from typing import Any

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..errors import MissingExtraError

ARCHITECTURES = {
    "DCFormerForCausalLM": "DCFormerArchitectureAdapter",
    "DCPythiaForCausalLM": "DCPythiaArchitectureAdapter",
}


def _adapters() -> dict[str, type]:
    """The adapters by their names; made when they are asked for, as their base class is the library's."""
    try:
        from transformer_lens.model_bridge import generalized_components as parts
        from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
    except ImportError as error:
        raise MissingExtraError(
            "dcformer.analysis.transformer_lens needs TransformerLens, which is not installed: pip install "
            '"transformer-lens>=4.3"'
        ) from error

    class DCFormerArchitectureAdapter(ArchitectureAdapter):
        """Hooks on the modules of a DCFormer; attention stays the model's own."""

        config_class = DCFormerConfig

        def __init__(self, cfg: Any):
            super().__init__(cfg)
            cfg.positional_embedding_type, cfg.attn_only, cfg.default_prepend_bos = "rotary", False, False
            cfg.attn_implementation = "eager"  # which has a pattern to hook
            self.weight_processing_conversions = {**self._qkvo_weight_conversions()}
            self.describe(self.config_class())

        def prepare_model(self, hf_model: Any) -> None:
            """Called with the model, before its parts are wrapped: what they are is in its configuration."""
            super().prepare_model(hf_model)
            self.describe(hf_model.config)

        def describe(self, config: DCFormerConfig) -> None:
            """Says where the parts are, of a model with this configuration."""
            self.is_rms, self.is_gated = config.norm_type == "rmsnorm", config.mlp_type == "gated"
            self.is_parallel = config.use_parallel_residual
            self.cfg.normalization_type = "RMS" if self.is_rms else "LN"
            self.cfg.uses_rms_norm = self.cfg.final_rms = self.is_rms
            self.cfg.gated_mlp, self.cfg.parallel_attn_mlp = self.is_gated, self.is_parallel
            self.component_mapping = {
                "embed": parts.EmbeddingBridge(name="model.embed_tokens"),
                "rotary_emb": parts.RotaryEmbeddingBridge(name="model.rotary_emb"),
                "blocks": self.blocks(),
                "ln_final": self.norm("model.norm"),
                "unembed": parts.UnembeddingBridge(name="lm_head", config=self.cfg),
            }

        def norm(self, name: str) -> Any:
            bridge = parts.RMSNormalizationBridge if self.is_rms else parts.NormalizationBridge
            return bridge(name=name, config=self.cfg)

        def mlp(self) -> Any:
            if self.is_gated:
                return self._gated_mlp()
            linear = {"in": parts.LinearBridge(name="up_proj"), "out": parts.LinearBridge(name="down_proj")}
            return parts.MLPBridge(name="mlp", config=self.cfg, submodules=linear)

        def blocks(self) -> Any:
            linear = {letter: parts.LinearBridge(name=f"{letter}_proj") for letter in "qkvo"}
            attention = parts.AttentionBridge(
                name="self_attn", config=self.cfg, submodules=linear, maintain_native_attention=True
            )
            inside = {
                "ln1": self.norm("input_layernorm"),
                "ln2": self.norm("post_attention_layernorm"),
                "attn": attention,
                "mlp": self.mlp(),
            }
            bridge = parts.ParallelBlockBridge if self.is_parallel else parts.BlockBridge
            return bridge(name="model.layers", submodules=inside)

    class DCPythiaArchitectureAdapter(DCFormerArchitectureAdapter):
        """The same for DCPythia."""

        config_class = DCPythiaConfig

    return {one.__name__: one for one in (DCFormerArchitectureAdapter, DCPythiaArchitectureAdapter)}


_MADE: dict[str, type] = {}


def __getattr__(name: str) -> Any:
    if name not in ARCHITECTURES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _MADE:
        _MADE.update(_adapters())
    return _MADE[name]


def register() -> None:
    """Makes the adapters known to TransformerLens, and to its `boot_transformers`.

    Entry points are enough for the factory; in 4.3.0 `boot_transformers` looks only into a table of its own, which is
    filled here as well.

    Raises:
        MissingExtraError: without TransformerLens.
    """
    adapters = {architecture: __getattr__(name) for architecture, name in ARCHITECTURES.items()}
    from transformer_lens.factories import architecture_adapter_factory as factory

    factory.ArchitectureAdapterFactory.discover_entry_points()  # before the tables have our names, as it warns of such
    for architecture, adapter in adapters.items():
        factory.ArchitectureAdapterFactory.register_adapter(architecture, adapter)
        factory.SUPPORTED_ARCHITECTURES[architecture] = adapter


__all__ = ["ARCHITECTURES", "register"]
