"""Rows to train on, and what has to be right about them, the tokenizer and the output before training starts.

Tokenising, packing, masks of assistants' turns and batches are TRL's (`SFTTrainer`). Packed rows come with position ids
that restart at every document, which is how DCFormer's attention tells documents apart (docs/architecture.md).
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset, load_dataset
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .arguments import DataArguments, TrainingConfig

Rows: TypeAlias = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
_SAMPLE_ROWS = 8
_MOST_UNKNOWN = 0.5  # share of unknown tokens above which tokenizer and data do not belong together


def load_rows(source: str, split: str, config: str | None = None, streaming: bool = False) -> Rows:
    """Opens a local file, a local folder or a data set on the Hub.

    Args:
        source: path or name.
        split: of a folder or a data set on the Hub; a file is one split.
        config: configuration of a data set on the Hub.
        streaming: read while training instead of before.

    Raises:
        FileNotFoundError: when `source` looks like a path and is not there.
        ValueError: when there is no such split, the file's kind is unknown, or it is empty.
    """
    path = Path(source)
    if path.is_file():
        suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
        builder = _BUILDERS.get(suffixes[-1].lower() if suffixes else "")
        if builder is None:
            raise ValueError(f"{source}: unknown kind of file, expected one of {', '.join(_BUILDERS)} (or compressed)")
        if path.stat().st_size == 0:
            raise ValueError(f"{source} is empty: expected at least one row to train on")
        return load_dataset(builder, data_files=str(path), split="train", streaming=streaming)
    if not path.is_dir() and (path.suffix in {*_BUILDERS, *_COMPRESSED} or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"no file {source}: give the path of a file or folder, or the name of a Hub data set")
    return load_dataset(source, config, split=split, streaming=streaming)


def check_rows(rows: Rows, column: str | None, source: str) -> Rows:
    """Keeps the columns to train on, under the names TRL gives them.

    Args:
        rows: as loaded.
        column: the column with texts or conversations, or None to look for "messages", "prompt" with "completion", or
            "text".
        source: what messages call the rows.

    Returns:
        rows with "text", "messages", or "prompt" and "completion".

    Raises:
        ValueError: when there is no row, no such column, or the column holds something else.
    """
    first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"{source} has no rows: expected at least one to train on")
    if column is not None and column not in first:
        raise ValueError(f"{source} has no column {column!r}, only {_listed(first)}: choose one of them with --column")
    if column is None:
        choices = (("messages",), ("prompt", "completion"), ("text",))
        kept = next((names for names in choices if all(name in first for name in names)), None)
        if kept is None:
            raise ValueError(
                f"{source} has columns {_listed(first)}, none of which is 'text' or 'messages' (or 'prompt' with "
                "'completion'): name the one with texts or conversations with --column"
            )
    else:
        kept = (column,)
    for name in kept:
        _check_value(first[name], name, source)
    rows = rows.select_columns(list(kept))
    if column is not None:
        name = "text" if isinstance(first[column], str) else "messages"
        rows = rows if column == name else rows.rename_column(column, name)
    return rows


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _check_value(value: Any, name: str, source: str) -> None:
    is_conversation = isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value)
    if is_conversation and all({"role", "content"} <= turn.keys() for turn in value):
        return
    if not isinstance(value, str) or (name == "messages"):
        raise ValueError(
            f"{source}: column {name!r} holds {str(value)[:80]!r} ({type(value).__name__}): expected a text, or a list "
            'of turns {"role": ..., "content": ...}'
        )


def make_data(data: DataArguments, training: TrainingConfig) -> tuple[Rows, Rows | None]:
    """The rows to train on and those held out, if any; checked, not yet tokenised.

    Raises:
        ValueError, OSError: as `load_rows` and `check_rows`; when a stream has no end to train to; when more rows are
            to be held out than there are.
    """
    if data.streaming and training.max_steps <= 0:
        raise ValueError(f"--streaming needs --max_steps, got {training.max_steps}: a stream does not know its length")
    column = data.column
    if column is None and training.dataset_text_field != "text":  # TRL's name for the same
        column = training.dataset_text_field
    training.dataset_text_field = "text"
    rows = load_rows(data.data, data.split, data.data_config, data.streaming)
    rows = check_rows(rows, column, data.data)
    held_out = None
    if data.eval_data or data.eval_split:
        source = data.eval_data or data.data
        held_out = load_rows(source, data.eval_split or data.split, data.data_config)
        held_out = check_rows(held_out, column, source)
    elif data.eval_rows and isinstance(rows, IterableDataset):
        held_out, rows = rows.take(data.eval_rows), rows.skip(data.eval_rows)
    elif data.eval_rows:
        if data.eval_rows >= len(rows):
            raise ValueError(
                f"--eval_rows {data.eval_rows} leaves nothing to train on: {data.data} has {len(rows)} rows"
            )
        parts = rows.train_test_split(data.eval_rows, seed=training.data_seed or training.seed)
        rows, held_out = parts["train"], parts["test"]
    if isinstance(rows, IterableDataset) and data.shuffle_buffer:
        rows = rows.shuffle(seed=training.data_seed or training.seed, buffer_size=data.shuffle_buffer)
    return rows, held_out


def check_output(training: TrainingConfig) -> str | None:
    """Makes sure that the output folder can be written, and finds the checkpoint to resume from.

    `--resume_from_checkpoint last` means the newest whole checkpoint of the output folder; one that was cut short while
    it was written is passed over. Without any, training starts from the beginning.

    Returns:
        the folder of the checkpoint, or None.

    Raises:
        OSError: when the output folder cannot be written, or holds checkpoints though nothing was said about resuming.
        FileNotFoundError: when the named checkpoint is not whole.
    """
    if not training.output_dir:
        raise ValueError("output_dir is not set: name a folder for checkpoints and the model with --output_dir")
    folder = Path(training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write to output_dir {folder} ({error}): choose another with --output_dir") from None
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    found.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    wanted = training.resume_from_checkpoint
    if not wanted:
        if found:
            raise FileExistsError(
                f"output_dir {folder} already holds {found[-1].name}: continue with --resume_from_checkpoint last, or "
                "choose another --output_dir"
            )
        return None
    if wanted != "last":
        if not _is_whole(Path(wanted)):
            raise FileNotFoundError(
                f"no whole checkpoint at {wanted}: expected a folder checkpoint-N with a readable trainer_state.json; "
                "--resume_from_checkpoint last takes the newest one"
            )
        return wanted
    return next((str(path) for path in reversed(found) if _is_whole(path)), None)


def _is_whole(checkpoint: Path) -> bool:
    """Whether the file that the trainer writes last is there and complete."""
    try:
        TrainerState.load_from_json(os.fspath(checkpoint / "trainer_state.json"))
    except (OSError, json.JSONDecodeError, TypeError):
        return False
    return True


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, rows: Rows, own: str | None) -> None:
    """Refuses a tokenizer that is not the model's, or that does not know the data's words.

    Args:
        tokenizer: the one to use.
        model: its vocabulary size and padding token count.
        rows: as `check_rows` returns them.
        own: file `tokenizer.json` that came with the model, or None; another vocabulary than its is refused.

    Raises:
        ValueError: naming what differs.
    """
    size: Any = model.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has token ids up to {largest}, the model's vocabulary has {size}: "
            "use the model's own tokenizer (leave out --tokenizer)"
        )
    if own is not None:
        vocabulary, other = Tokenizer.from_file(own).get_vocab(), tokenizer.get_vocab()
        if changed := sorted(token for token, index in vocabulary.items() if other.get(token) != index):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} is not the model's: {len(changed)} of its {len(vocabulary)} "
                f"tokens, such as {changed[0]!r}, have another id or none. Leave out --tokenizer"
            )
    if tokenizer.unk_token_id is None:
        return
    ids = [token for row in rows.take(_SAMPLE_ROWS) for text in _texts(row) for token in tokenizer(text)["input_ids"]]
    unknown = ids.count(tokenizer.unk_token_id) / max(1, len(ids))
    if unknown > _MOST_UNKNOWN:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} does not know {unknown:.0%} of the tokens of the first rows: it "
            "is not made for this data, and the model would learn nothing"
        )


def _texts(row: Mapping[str, Any]) -> Iterable[str]:
    for value in row.values():
        yield from [value] if isinstance(value, str) else [str(turn["content"]) for turn in value]


def set_max_length(training: TrainingConfig, limit: int, streaming: bool) -> None:
    """Fills in `max_length` where rows are packed or streamed, and checks it against the model.

    Raises:
        ValueError: when it is longer than `max_position_embeddings` (`limit`), or not positive.
    """
    if training.max_length is None and (training.packing or streaming):
        training.max_length = limit
    if training.max_length is not None and not 0 < training.max_length <= limit:
        raise ValueError(
            f"max_length is {training.max_length}: expected 1 to {limit}, the model's max_position_embeddings"
        )


def check_lengths(rows: Dataset, limit: int) -> None:
    """Refuses tokenised rows that are longer than the model's `max_position_embeddings` (`limit`).

    Raises:
        ValueError: naming the first such row.
    """
    start = 0
    for batch in rows.select_columns("input_ids").with_format("arrow").iter(1000):
        lengths = batch["input_ids"].combine_chunks().value_lengths().to_pylist()
        for index, length in enumerate(lengths, start):
            if length > limit:
                raise ValueError(
                    f"row {index} has {length} tokens, more than the model's max_position_embeddings {limit}: cut rows "
                    f"with --max_length {limit}, or lose nothing with --packing"
                )
        start += len(lengths)
