"""Special tokens of a stored tokenizer: which ones begin and end a text and fill a batch, and their ids."""

import json
import os
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from .stored_dcformer import find_file, hub_arguments

END_OF_TEXT = "<|endoftext|>"
_SPECIAL = ("bos_token", "eos_token", "pad_token")


def tokenizer_special_ids(
    path: str | os.PathLike, arguments: Mapping[str, Any], tokenizer: Any = None
) -> dict[str, tuple[str, int]]:
    """A tokenizer's ids of beginning and end of text, and of padding.

    Args:
        path: a folder, or the name of a repository on the Hub.
        arguments: those of `from_pretrained`.
        tokenizer: what `load_tokenizer` makes of it, if that is known.

    Returns:
        "bos_token_id", "eos_token_id" and "pad_token_id" -> token and id. Each token is the first of these that the
        files contain: the one that the tokenizer's configuration names; the one that its class names, where it has been
        loaded; and, but for padding, "<|endoftext|>", with which every tokenizer that has it separates documents. Empty
        when there is no tokenizer.
    """
    settings = _tokenizer_file(path, "tokenizer_config.json", arguments)
    mapped = _tokenizer_file(path, "special_tokens_map.json", arguments)
    # As in the library, the map takes precedence, unless the configuration lists added tokens: then it is not read.
    settings = settings if "added_tokens_decoder" in settings else settings | mapped
    named: dict[str, Any] = {kind: token for kind in _SPECIAL if isinstance(token := _content(settings.get(kind)), str)}
    try:
        file = find_file(path, "tokenizer.json", arguments)
        vocabulary = {} if file is None else Tokenizer.from_file(file).get_vocab()
        if tokenizer is None and file is None and find_file(path, "tokenizer_config.json", arguments) is not None:
            tokenizer = load_tokenizer(path, arguments)
    except Exception:  # the libraries raise nothing narrower; who asks for the tokenizer is told
        return {}
    if tokenizer is not None:
        # What only its class names, the library has added behind the vocabulary: no text has it.
        stored = {*vocabulary, *named.values(), *_tokenizer_file(path, "added_tokens.json", arguments)}
        for name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
            tokens = settings.get(name) or ()
            stored |= {_content(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)}
        size = tokenizer.vocab_size if file is None else 0
        vocabulary = {t: number for t, number in tokenizer.get_vocab().items() if number < size or t in stored}
        named = {kind: getattr(tokenizer, kind, None) for kind in _SPECIAL}
    ids: dict[str, tuple[str, int]] = {}
    for kind in _SPECIAL:
        for token in (named.get(kind), None if kind == "pad_token" else END_OF_TEXT):
            if token in vocabulary:
                ids[f"{kind}_id"] = (token, vocabulary[token])
                break
    return ids


def _tokenizer_file(path: str | os.PathLike, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON file of a tokenizer; empty where there is none, or it is damaged."""
    if (file := find_file(path, name, arguments)) is None:
        return {}
    try:
        with open(file, encoding="utf-8") as opened:
            read = json.load(opened)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _content(token: Any) -> Any:
    """A token in a JSON file, which may be an object with settings of its own."""
    return token.get("content") if isinstance(token, dict) else token


def load_tokenizer(path: str | os.PathLike, arguments: Mapping[str, Any]) -> Any:
    """The tokenizer that Transformers makes of a folder.

    Args:
        path, arguments: as for `tokenizer_special_ids`.

    Raises:
        OSError: when it has no vocabulary: the library would make an empty tokenizer.
        Exception: what the library raises, which is anything.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **hub_arguments(arguments))
    own = sorted(set(type(tokenizer).vocab_files_names.values()))
    if own and all(find_file(path, file, arguments) is None for file in ("tokenizer.json", "tokenizer.model", *own)):
        raise OSError(
            f"{os.fspath(path)} has no vocabulary of a {type(tokenizer).__name__}: expected {' or '.join(own)}"
        )
    return tokenizer


__all__ = ["END_OF_TEXT", "load_tokenizer", "tokenizer_special_ids"]
