"""A Llama whose queries, keys and values are one product, as ours are with fused projections: what decoding is compared
with. Transformers' own Llama has three products there, two launches more in each layer of a step.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from dcformer.cache_dcformer import takes_cache


class OneProductAttention(LlamaAttention):
    """Attention of a Llama for inference: `qkv_proj` for `q_proj`, `k_proj` and `v_proj`."""

    @classmethod
    def take_over(cls, attention: LlamaAttention) -> None:
        """Joins the three projections of a module, in place."""
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        del attention.q_proj, attention.k_proj, attention.v_proj
        state = {name: torch.cat([part.state_dict()[name] for part in parts]) for name in parts[0].state_dict()}
        rows, columns = state["weight"].shape
        attention.qkv_proj = nn.Linear(columns, rows, "bias" in state, device="meta").requires_grad_(False)
        attention.qkv_proj.load_state_dict(state, assign=True)
        attention.__class__ = cls

    @takes_cache
    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None,
        cache: Any = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """What `LlamaAttention` computes. hidden_states: [B, T, E]."""
        states = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H + 2 Hkv, T, D]
        kv_heads = self.config.num_key_value_heads
        q, k, v = states.split([self.config.num_attention_heads, kv_heads, kv_heads], 1)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2)), weights


def one_product(model: Any) -> Any:
    """The same Llama, for inference, with one product for queries, keys and values in each layer; changed in place."""
    for layer in model.model.layers:
        OneProductAttention.take_over(layer.self_attn)
    return model.eval()
