"""What a head's circuits do to tokens (paper appendix G.1; A Mathematical Framework for Transformer Circuits).

Letters: E hidden size, D head dim, V vocabulary, N tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import DCFormerError
from ..shards import refuse_shards
from .layers import Layer, chosen, layers_of, listed, refuse_nonfinite, whole
from .tracing import token_texts
from .weights import circuit_weights


def single_token(tokenizer: Any, text: str) -> int:
    """The id of a text that is one token.

    Raises:
        DCFormerError: showing the tokenization when it is another number of tokens, or an unknown one.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = tokenizer.convert_ids_to_tokens(ids)
        raise DCFormerError(f"{text!r} is {len(ids)} tokens, {pieces}: expected a text that is one token.")
    if ids[0] == tokenizer.unk_token_id and text.strip() != tokenizer.unk_token:
        raise DCFormerError(f"{text!r} is unknown to the tokenizer, which makes it {tokenizer.unk_token!r}.")
    return int(ids[0])


@dataclass
class OVTable:
    """What a head writes when it looks at a token.

    Attributes:
        layer, head: which.
        tokens: the N tokens looked at.
        ids: [N, k], the token ids with the highest logits, best first.
        logits: [N, k], theirs.
        top: the same as texts.
    """

    layer: int
    head: int
    tokens: list[str]
    ids: torch.Tensor
    logits: torch.Tensor
    top: list[list[str]]

    def __str__(self) -> str:
        lines = [f"| head {self.layer}.{self.head} looks at | and writes |", "|---|---|"]
        return "\n".join(
            lines + [f"| {t!r} | {', '.join(map(repr, top))} |" for t, top in zip(self.tokens, self.top, strict=True)]
        )


def _language_model(model: Any) -> tuple[list[Layer], Any, Any]:
    """The layers, the decoder and the output layer."""
    found = layers_of(model)
    refuse_shards(model, "load it again, whole")  # its embeddings are read, and called alone
    decoder, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if decoder is None or head is None:
        raise DCFormerError(f"{type(model).__name__} has no lm_head: expected a causal language model of this package.")
    return found, decoder, head


@torch.no_grad()
def ov_table(
    model: nn.Module,
    tokenizer: Any,
    layer: int,
    head: int,
    tokens: Iterable[str | int] | str | int,
    k: int = 10,
    final_norm: bool = False,
) -> OVTable:
    """The tokens that a head's OV circuit makes most likely, for tokens that it looks at (paper equation 12).

    x = embed(token); x ← x + MLP_0(norm_0(x)); logits = unembed(norm_layer(x) W_V W_O), with norm_0 the norm in front
    of the first layer's MLP and norm_layer the one in front of the layer's attention. Biases are left out.

    Args:
        model: a causal language model of this package.
        tokenizer: its tokenizer.
        layer, head: which.
        tokens: texts of one token each, or ids; one of either stands for itself.
        k: how many to name.
        final_norm: put the model's final norm before the output layer; the equation has none.

    Returns:
        `OVTable`; printed, it is a table in Markdown.

    Raises:
        DCFormerError: on a token that is not one id, showing the tokenization, on numbers out of range, and NaN.
    """
    found, decoder, unembed = _language_model(model)
    (layer,), (head,) = chosen([layer], len(found), "layer"), chosen([head], found[0].heads, "head")
    ids = [single_token(tokenizer, token) if isinstance(token, str) else token for token in listed(tokens)]
    ids = chosen(ids, decoder.embed_tokens.num_embeddings, "token id", from_end=False)
    if whole(k, "k") < 1:
        raise DCFormerError(f"k={k} must be at least 1.")
    device, dtype = unembed.weight.device, unembed.weight.dtype
    first, here = found[0].module, found[layer].module
    x = decoder.embed_tokens(torch.tensor(ids, device=device))
    x = x + first.mlp(first.post_attention_layernorm(x))  # [N, E]
    weights = circuit_weights(model, layer)
    moved = here.input_layernorm(x).double().cpu() @ weights.W_V[head] @ weights.W_O[head]  # [N, E]
    moved = moved.to(device, dtype)
    logits = unembed(decoder.norm(moved) if final_norm else moved).float()  # [N, V]
    if not logits.isfinite().all():
        refuse_nonfinite(model, "the logits")
    best = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return OVTable(
        layer,
        head,
        token_texts(tokenizer, ids),
        best.indices.cpu(),
        best.values.cpu(),
        [token_texts(tokenizer, row) for row in best.indices.tolist()],
    )


@dataclass
class CircuitScores:
    """What a head's circuits do with tokens as such, each in [-1, 1].

    Attributes:
        copying: Σ λ / Σ |λ| over the eigenvalues of W_E W_V W_O W_U: 1 for a head that makes the tokens that it looks
            at more likely, -1 for one that makes them less likely.
        self_match: the same of W_E W_Q W_Kᵀ W_Eᵀ: 1 for a head that looks for the token it is at.
    """

    copying: float
    self_match: float


def signed_share(first: torch.Tensor, second: torch.Tensor) -> float:
    """Σ λ / Σ |λ| over the eigenvalues of `first @ second` [V, V], computed from `second @ first` [D, D].

    Both products have the same eigenvalues other than 0. Complex ones come in pairs, so the sum is real.
    """
    values = torch.linalg.eigvals(second @ first)
    size = values.abs().sum()
    return (values.sum().real / size).item() if size > 0 else 0.0


@torch.no_grad()
def circuit_scores(model: nn.Module, layer: int, head: int) -> CircuitScores:
    """The copying score of a head's OV circuit, and the self-match of its QK circuit.

    Embeddings are taken as they are, without norms or the first MLP, and QK without RoPE.

    Args:
        model: a causal language model of this package.
        layer, head: which.

    Raises:
        DCFormerError: on numbers out of range, and NaN.
    """
    found, decoder, unembed = _language_model(model)
    (layer,), (head,) = chosen([layer], len(found), "layer"), chosen([head], found[0].heads, "head")
    weights = circuit_weights(model, layer)
    embed = decoder.embed_tokens.weight.detach().double().cpu()  # [V, E]
    output = unembed.weight.detach().double().cpu().T  # [E, V]
    if not (embed.isfinite().all() and output.isfinite().all()):
        refuse_nonfinite(model, "embeddings")
    return CircuitScores(
        copying=signed_share(embed @ weights.W_V[head], weights.W_O[head] @ output),
        self_match=signed_share(embed @ weights.W_Q[head], (embed @ weights.W_K[head]).T),
    )


__all__ = ["CircuitScores", "OVTable", "circuit_scores", "ov_table", "signed_share", "single_token"]
