"""What models are called with: what does not fit is refused before anything is computed or saved.

Letters: B batch, T queries, S keys, E hidden size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .cache_dcformer import CACHE_NAME, check_cache_layers
from .configuration_dcformer import DCFormerConfig


def look_up(embedding: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B, T, E].

    Raises:
        ValueError: naming a token id outside the vocabulary, where looking it up has failed (on the CPU).
    """
    try:
        return embedding(input_ids)
    except IndexError as error:
        size = embedding.num_embeddings
        wrong = [number for number in input_ids.flatten().tolist() if not 0 <= number < size]
        if not wrong:
            raise
        raise ValueError(
            f"input_ids holds token id {wrong[0]}, outside the model's vocabulary of {size} ids (0 to {size - 1}): "
            "is the tokenizer the model's own?"
        ) from error


def check_input_shapes(
    hidden_states: torch.Tensor, attention_mask: Any, position_ids: torch.Tensor | None, are_embeds: bool
) -> None:
    """Refuses arguments of a model whose shapes do not go together.

    Args:
        hidden_states: what the first layer gets; of ids, or as given.
        attention_mask, position_ids: as given. Other masks than tensors are not looked at.
        are_embeds: whether the hidden states were given.

    Raises:
        ValueError: naming the argument, its shape and those that it may have.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a graph would have guards of these sizes
        return
    if hidden_states.dim() != 3:
        name, shape = ("inputs_embeds", hidden_states.shape) if are_embeds else ("input_ids", hidden_states.shape[:-1])
        expected = "[sequences, tokens, hidden_size]" if are_embeds else "[sequences, tokens]"
        raise ValueError(f"{name} of shape {list(shape)}: expected {expected}, also of a single sequence.")
    batch, length, _ = hidden_states.shape
    mask = attention_mask if isinstance(attention_mask, torch.Tensor) else None
    if mask is not None and (mask.dim() not in (2, 4) or mask.shape[0] not in (1, batch)):
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} does not fit {batch} sequences: expected "
            f"[{batch} or 1, tokens], or [{batch} or 1, heads or 1, queries, keys]; or none where nothing is padded."
        )
    if position_ids is not None and position_ids.shape not in ((1, length), (batch, length)):
        raise ValueError(
            f"position_ids of shape {list(position_ids.shape)} do not fit {batch} sequences of {length} tokens: "
            f"expected [{batch} or 1, {length}], of the tokens of this call alone."
        )


def check_mask_length(mask: torch.Tensor, cache: Cache, length: int) -> None:
    """Refuses a mask [B, S] that ends before the tokens of a call do, as that of the new ones alone.

    Args:
        mask: as given.
        cache: before the call.
        length: of the call.

    Raises:
        ValueError: naming both lengths.
    """
    if torch.compiler.is_compiling():  # a graph would have a guard of both lengths
        return
    seen = cache.get_seq_length()
    if isinstance(seen, torch.Tensor):  # of a static cache: a GPU is not waited for
        seen = int(seen) if seen.device.type == "cpu" else 0
    if mask.shape[1] < seen + length:
        raise ValueError(
            f"attention_mask of {mask.shape[1]} columns is too short: {CACHE_NAME} holds {seen} tokens, and {length} "
            f"are new. Give one of {seen + length} columns, those in the cache first, or none where nothing is padded."
        )


def check_packing(
    others: Mapping[str, Any], position_ids: torch.Tensor | None, attention_mask: Any, cache: Cache | None
) -> None:
    """Refuses arguments for packed documents that no layer reads, where nothing else says where documents begin.

    Args:
        others: what a model was called with besides what it knows, by name.
        position_ids, attention_mask, cache: as given.

    Raises:
        ValueError: naming the arguments, and what says it.
    """
    packs = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if others.get(name) is not None]
    if packs and (position_ids is None or attention_mask is not None or cache is not None):
        raise ValueError(
            f"{' and '.join(packs)} {'are' if len(packs) > 1 else 'is'} not read: position_ids say where documents "
            "begin. Give those that begin anew with each document, no attention_mask and no cache "
            "(DataCollatorWithFlattening does by default)."
        )


def check_cache(
    cache: Cache, config: DCFormerConfig, length: int, is_causal: bool | None, runs_layers_twice: bool
) -> None:
    """Refuses a cache that another model made, and one for which the result would be wrong.

    Args:
        cache: to be filled with this call's tokens.
        config: the model's.
        length: how many tokens these are.
        is_causal: as given to `forward`.
        runs_layers_twice: the backward pass is to compute them again (gradient checkpointing).

    Raises:
        ValueError: naming what does not fit.
    """
    check_cache_layers(cache, config, length)
    if is_causal is None:
        is_causal = getattr(config, "is_causal", True)
    if not is_causal and any(layer.is_compileable for layer in cache.layers):
        raise ValueError(
            f"is_causal=False with a {type(cache).__name__}: attention in both directions would see its slots that "
            "are not filled. Pass a DynamicCache, or no cache."
        )
    if runs_layers_twice:
        raise ValueError(
            f"{CACHE_NAME} cannot be used with gradient checkpointing: layers that are computed "
            "again in the backward pass would write to the cache twice. Pass no cache, switch gradient "
            "checkpointing off, or compute under torch.no_grad()."
        )


def refuse_missing_layers(layers: int, number: int) -> None:
    """Refuses to save a model of fewer layers than its configuration says.

    Args:
        layers: how many the model has.
        number: `config.num_hidden_layers`.

    Raises:
        ValueError: naming the field.
    """
    if layers < number:
        raise ValueError(
            f"the model has {layers} layers and config.num_hidden_layers={number}: loaded again, it would have new "
            f"ones behind them. Set config.num_hidden_layers = {layers}."
        )


def share_of_labels(labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> Any:
    """What part of a step's labels a batch has, by which a mean over it counts where `Trainer` adds up batches.

    Args:
        labels: of any shape, -100 where there is none.
        num_items_in_batch: labels of all batches and processes of a step, as `Trainer` tells models; None: this is all.
    """
    if num_items_in_batch is None:
        return 1
    return (labels != -100).sum() / torch.as_tensor(num_items_in_batch, device=labels.device)


__all__ = [
    "check_cache",
    "check_input_shapes",
    "check_mask_length",
    "check_packing",
    "look_up",
    "refuse_missing_layers",
    "share_of_labels",
]
