"""Word-level tokenizer of the synthetic tasks, and encoding of contexts for training."""

import string
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .contexts import parse_context
from .tasks import wording
from .vocabulary import word_lists

SPECIAL_TOKENS = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
MODEL_MAX_LENGTH = 2048
IGNORE_INDEX = -100

_CHARACTERS = string.ascii_letters + string.digits + "_"
_INSIDE = "##"  # before a character that does not begin a word
_TOKEN = r"\n|\w+|[^\w\s]"  # a newline, a word or a punctuation mark; other white space only separates


def build_tokenizer(model_max_length: int = MODEL_MAX_LENGTH, spell: bool = False) -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer of generated contexts.

    Each word, punctuation mark and newline is a token; newlines end answers. Nothing is added around a text: the
    newline that begins a context serves as its start. Every text :func:`generate_dataset` makes, brackets or not, is
    encoded without ``<unk>`` and decoded to itself. In other texts decoding normalizes white space: one space between
    tokens, none before ``. , ? !`` and none around a newline.

    Args:
        model_max_length: tokens that the model takes, its ``max_position_embeddings``.
        spell: whether words of ASCII letters, digits and underscores that are not known are spelled, behind the longest
            known word that they begin with, rather than ``<unk>``. ``generate(stop_strings=...)`` needs that: the
            library decodes a word of its own together with every token.

    Returns:
        A tokenizer that pads on the left, with the same ids on every machine: special tokens, newline, punctuation,
        the words of the sentences, the word lists, then the characters, at the beginning of a word and inside one.
    """
    split = pre_tokenizers.Split(Regex(_TOKEN), behavior="removed", invert=True)
    tokens = [*SPECIAL_TOKENS.values(), "\n", "[", "]"]
    for text in (*wording(), *(" ".join(words) for words in word_lists().values())):
        tokens += [token for token, _ in split.pre_tokenize_str(text)]
    if spell:
        tokens += [prefix + character for prefix in ("", _INSIDE) for character in _CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}

    unknown = SPECIAL_TOKENS["unk_token"]
    model: models.Model
    if spell:
        model = models.WordPiece(vocabulary, unk_token=unknown, continuing_subword_prefix=_INSIDE)
    else:
        model = models.WordLevel(vocabulary, unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    # The first decoder puts a space before each token but the first and takes it away before punctuation.
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=_INSIDE, cleanup=True),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        truncation_side="left",
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def encode(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> dict[str, list[int]]:
    """Token ids of a context, with labels on its scored answers, for training or for measuring the loss.

    Suits ``Dataset.map``; ``DataCollatorForSeq2Seq`` pads the result.

    Args:
        record: a row with ``texts``, from :func:`read_dataset` or :func:`generate_dataset`.
        tokenizer: :func:`build_tokenizer`'s or any other fast tokenizer.
        max_length: the most tokens to return; whole examples are dropped from the beginning.

    Returns:
        ``input_ids`` of the plain text, and ``labels``, equal to them on scored answers and -100 elsewhere. They are
        not shifted: Transformers' models do that.

    Raises:
        ValueError: if the tokenizer is not a fast one, or not even the last scored example fits.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}: expected a fast tokenizer, for its offsets")
    context = parse_context(record["texts"])
    text, answers, dropped = context.text, context.answers, 0
    while True:
        # verbose=False: no warning about texts beyond the model's maximum, which max_length is for
        encoding = tokenizer(text[dropped:], return_offsets_mapping=True, verbose=False)
        input_ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        if max_length is None or len(input_ids) <= max_length:
            break
        dropped = text.find("\n", dropped + 1)
        if dropped < 0 or not any(answer.start > dropped for answer in answers):
            raise ValueError(
                f"max_length is {max_length}: expected enough for the last example, which has {len(input_ids)} tokens"
            )
    labels = [
        token if any(start + dropped < a.end and end + dropped > a.start for a in answers) else IGNORE_INDEX
        for token, (start, end) in zip(input_ids, offsets, strict=True)
    ]
    return {"input_ids": list(input_ids), "labels": labels}
