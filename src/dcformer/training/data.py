"""Rows to train on, and checks of rows, tokenizer and output before training starts.

TRL (`SFTTrainer`) tokenizes, packs, masks all but the assistants' turns, and makes batches. In packed rows position ids
restart at every document, by which DCFormer's attention keeps documents apart (docs/architecture.md).
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.compute  # type: ignore[import-untyped]  # it ships no types
import torch
from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import SFTTrainer

from ..configuration_dcformer import DCFormerConfig
from ..errors import DCFormerError, raise_bug, refused
from ..peft_dcformer import LORA_TARGETS
from ..stored_dcformer import stored_tensors
from .arguments import DataArguments, TrainingConfig

Rows: TypeAlias = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
_CHECKED_ROWS = 1000  # examined one by one; of the others only schema and missing values are checked
_SAMPLE_ROWS = 8
_MOST_UNKNOWN = 0.5  # share of unknown tokens above which the tokenizer does not fit the data
_WEIGHTS = ("*model*.safetensors", "pytorch_model*")
_CHECKPOINT_PARTS = {  # DeepSpeed keeps all of them in a folder global_stepN
    "weights": (*_WEIGHTS, "global_step*"),
    "optimizer": ("optimizer*", "global_step*"),
    "scheduler": ("scheduler.pt", "global_step*"),
}
_TENSOR_FILES = ("*model*.safetensors", "pytorch_model*.bin", "optimizer*.pt", "scheduler.pt", "rng_state*.pth")


def load_rows(source: str, split: str = "train", config: str | None = None, streaming: bool = False) -> Rows:
    """Opens local files, a local folder (of files, or from `save_to_disk`) or a data set on the Hub.

    Args:
        source: path of a file, a pattern of paths ("texts/*.jsonl"), a folder, or a name.
        split: of a folder or a data set on the Hub; files are one split, "train".
        config: configuration of a data set on the Hub.
        streaming: read rows while training instead of before.

    Returns:
        the rows, unchanged.

    Raises:
        FileNotFoundError: when `source` looks like a path and does not exist.
        DCFormerError: when the split does not exist, a file is empty, or files are of an unknown type or of several.
    """
    path = Path(source)
    if files := _files(source):
        if split != "train":
            raise DCFormerError(
                f"{source} has no split {split!r}: files are one split, 'train'. Give held-out rows a file of "
                "their own with --eval_data, or hold some out with --eval_rows"
            )
        builders = {_builder(Path(file)) for file in files}
        if len(builders) > 1:
            raise DCFormerError(
                f"{source} matches files of different kinds ({', '.join(sorted(builders))}): choose one"
            )
        if empty := [file for file in files if os.path.getsize(file) == 0]:
            raise DCFormerError(f"{empty[0]} is empty: expected at least one row to train on")
        try:
            return load_dataset(builders.pop(), data_files=files, split="train", streaming=streaming)
        except ValueError as error:
            if "corresponds to no data" not in str(error):
                raise
            raise DCFormerError(f"{source} has no rows: expected at least one to train on") from error
    is_path = path.suffix in {*_BUILDERS, *_COMPRESSED} or source.startswith((".", "/", "~")) or "*" in source
    if is_path and not path.is_dir():
        raise FileNotFoundError(
            f"no file {source}: give the path of a file or folder, a pattern of paths in quotes, or the name of a Hub "
            "data set"
        )
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        saved = load_from_disk(source)
        parts = {"train": saved} if isinstance(saved, Dataset) else saved
        if split not in parts:
            raise DCFormerError(f"{source} has no split {split!r}, only {_listed(parts)}: choose one of them")
        rows = parts[split].with_format(None)
        return rows.to_iterable_dataset() if streaming else rows
    with refused(ValueError, what=source):  # a split or configuration that does not exist
        return load_dataset(source, config, split=split, streaming=streaming)


def _files(source: str) -> list[str]:
    """The local files that a path or pattern names."""
    return [source] if Path(source).is_file() else sorted(filter(os.path.isfile, glob(source, recursive=True)))


def _builder(path: Path) -> str:
    """The library's name for a file's type."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    builder = _BUILDERS.get(suffixes[-1].lower() if suffixes else "")
    if builder is None:
        raise DCFormerError(f"{path}: unknown kind of file, expected one of {', '.join(_BUILDERS)} (or compressed)")
    return builder


def check_rows(rows: Rows, column: str | None, source: str) -> Rows:
    """Selects the columns to train on, renames them as TRL expects, and checks the rows.

    Args:
        rows: as loaded. Schema, nulls and the first thousand rows of a `Dataset` are checked here; rows of a stream
            when they are read.
        column: the column with texts or conversations; None for "messages", "prompt" with "completion", or "text".
        source: the name of the rows in error messages.

    Returns:
        rows with "text", "messages", or "prompt" and "completion".

    Raises:
        DCFormerError: when rows or the column are missing, or a row has another type; for a stream also later, while
            rows are read.
    """
    first = next(iter(rows), None)
    if first is None:
        raise DCFormerError(f"{source} has no rows: expected at least one to train on")
    if column is not None and column not in first:
        raise DCFormerError(
            f"{source} has no column {column!r}, only {_listed(first)}: choose one of them with --column"
        )
    if column is None:
        choices = (("messages",), ("prompt", "completion"), ("text",))
        kept = next((names for names in choices if all(name in first for name in names)), None)
        if kept is None:
            raise DCFormerError(
                f"{source} has columns {_listed(first)}, none of which is 'text' or 'messages' (or 'prompt' with "
                "'completion'): name the one with texts or conversations with --column"
            )
    else:
        kept = (column,)
    rows = rows.select_columns(list(kept))
    if isinstance(rows, Dataset):
        for index, row in enumerate(rows.take(_CHECKED_ROWS)):
            _check_row(row, index, source)
        _check_nulls(rows, source)
    else:
        _check_row({name: first[name] for name in kept}, 0, source)
        rows = rows.map(_check_row, with_indices=True, fn_kwargs={"source": source}, features=rows.features)
    if column is not None:
        name = "text" if isinstance(first[column], str) else "messages"
        rows = rows if column == name else rows.rename_column(column, name)
    return rows


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _check_row(row: Mapping[str, Any], index: int, source: str) -> Mapping[str, Any]:
    for name, value in row.items():
        if not (_is_conversation(value) or (isinstance(value, str) and name != "messages")):
            raise DCFormerError(
                f"{source}, row {index}: column {name!r} holds {str(value)[:80]!r} ({type(value).__name__}): expected "
                'a text, or a list of turns {"role": ..., "content": ...}'
            )
    return row


def _check_nulls(rows: Dataset, source: str) -> None:
    """Refuses nulls. By the schema, all other rows have the type of the first."""
    size = 10_000
    for start, batch in enumerate(rows.with_format("arrow").iter(size)):
        for column in batch.columns:
            if column.null_count:
                index = pyarrow.compute.index(column.is_null(), True).as_py() + start * size
                _check_row(rows[index], index, source)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(turn, Mapping)
            and isinstance(turn.get("role"), str)
            and (isinstance(turn.get("content"), str) or turn.get("tool_calls"))
            for turn in value
        )
    )


def make_data(data: DataArguments, training: TrainingConfig) -> tuple[Rows, Rows | None]:
    """The rows to train on and the held-out rows, if any; checked, not yet tokenized.

    Args:
        data: their source.
        training: for `max_steps`, the seed of shuffling and holding out, and `dataset_text_field`, TRL's `column`.

    Returns:
        the rows to train on, shuffled if they are a stream, and the held-out rows or None.

    Raises:
        DCFormerError, OSError: as `load_rows` and `check_rows`; when files cannot be read, a stream comes without
            `max_steps`, or held-out rows are the training rows or leave nothing to train on.
    """
    if data.streaming and training.max_steps <= 0:
        raise DCFormerError(
            f"--streaming needs --max_steps, got {training.max_steps}: a stream does not know its length"
        )
    column = data.column
    if column is None and training.dataset_text_field != "text":
        column = training.dataset_text_field
    seed = training.seed if training.data_seed is None else training.data_seed
    rows = read_rows(data.data, data.split, column, data.data_config, data.streaming)
    held_out = None
    if data.eval_data or data.eval_split:
        source, split = data.eval_data or data.data, data.eval_split or "train"
        trained, named = (
            {Path(file).resolve(): file for file in _files(name) or [name]} for name in (data.data, source)
        )
        if split == data.split and (shared := trained.keys() & named.keys()):
            raise DCFormerError(
                f"held-out rows would be the training rows, split {split!r} of {named[min(shared)]}: name others with "
                "--eval_data or --eval_split, or hold some out with --eval_rows"
            )
        held_out = read_rows(source, split, column, data.data_config if source == data.data else None)
    elif data.eval_rows:
        if isinstance(rows, IterableDataset):
            # no stream: of one the library does not know which rows several processes repeat
            held_out = Dataset.from_list(list(rows.take(data.eval_rows)), features=rows.features)
            rows = rows.skip(data.eval_rows)
            is_enough = next(iter(rows), None) is not None
        elif is_enough := data.eval_rows < len(rows):
            parts = rows.train_test_split(data.eval_rows, seed=seed)
            rows, held_out = parts["train"], parts["test"]
        if not is_enough:
            raise DCFormerError(
                f"--eval_rows {data.eval_rows} leaves nothing to train on: {data.data} has no more rows than that"
            )
    if isinstance(rows, IterableDataset) and data.shuffle_buffer:
        rows = rows.shuffle(seed=seed, buffer_size=data.shuffle_buffer)
    return rows, held_out


def read_rows(source: str, split: str, column: str | None, config: str | None = None, streaming: bool = False) -> Rows:
    """Loads and checks rows; adds the file's name to errors of the formats' readers."""
    name = f"{source} (split {split!r})" if Path(source).is_dir() else source
    try:
        return check_rows(load_rows(source, split, config, streaming), column, name)
    except (ArrowException, DatasetsError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise DCFormerError(f"{source} cannot be read as rows of one kind: {reason[:300]}") from error


def check_output(training: TrainingConfig, model: str | None = None) -> str | None:
    """Checks that the output folder can be written, and finds the checkpoint to resume from.

    `--resume_from_checkpoint last` means the newest complete checkpoint of the output folder; one that was cut short
    while being written is skipped. Without any, training starts from the beginning. The choice is printed.

    Args:
        training: for `output_dir` and `resume_from_checkpoint`.
        model: folder or name of the model to train, or None for a new model.

    Returns:
        the folder of the checkpoint, or None.

    Raises:
        OSError: when the output folder cannot be written, is the model's own, or holds checkpoints or a model without
            being resumed from.
        FileNotFoundError: when the named checkpoint is incomplete.
    """
    folder = Path(training.output_dir)  # type: ignore[arg-type]  # TrainingConfig has refused None
    if model is not None and folder.resolve() == Path(model).resolve():
        raise FileExistsError(f"output_dir {folder} is the model to train: choose another with --output_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write to output_dir {folder} ({error}): choose another with --output_dir") from None
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    found.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    wanted = training.resume_from_checkpoint
    if wanted and wanted != "last":
        if missing := _missing(Path(wanted)):
            raise FileNotFoundError(
                f"{wanted} is not a complete checkpoint: it has no readable {' and no '.join(missing)}. Expected a "
                "folder checkpoint-N; --resume_from_checkpoint last takes the newest one"
            )
        return wanted
    if found and not wanted:
        raise FileExistsError(
            f"output_dir {folder} already holds {found[0].name}: continue with --resume_from_checkpoint last, or "
            "choose another --output_dir"
        )
    lines = []
    for checkpoint in found:
        if not (missing := _missing(checkpoint)):
            lines.append(f"continues from {checkpoint}")
            break
        lines.append(f"{checkpoint} is skipped: it has no readable {' and no '.join(missing)}")
    else:
        checkpoint = None
        if any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
            raise FileExistsError(f"output_dir {folder} already holds a model: choose another with --output_dir")
        lines += [f"{folder} has no complete checkpoint: training starts from the beginning"] if wanted else []
    if training.process_index == 0:
        print(*lines, sep="\n", end="\n" * bool(lines))
    return None if checkpoint is None else str(checkpoint)


def _missing(checkpoint: Path) -> list[str]:
    """What a checkpoint lacks, damaged files among it; the trainer writes the state last."""
    missing = [
        part
        for part, patterns in _CHECKPOINT_PARTS.items()
        if not any(path for pattern in patterns for path in checkpoint.glob(pattern))
    ]
    try:
        for index in checkpoint.glob("*.index.json"):
            shards = set(json.loads(index.read_text())["weight_map"].values())
            missing += [shard for shard in sorted(shards) if not (checkpoint / shard).is_file()]
        TrainerState.load_from_json(os.fspath(checkpoint / TRAINER_STATE_NAME))
    except (OSError, json.JSONDecodeError, TypeError):
        missing.append(TRAINER_STATE_NAME)
    return missing + [file.name for file in sorted(checkpoint.glob("*")) if _is_damaged(file)]


def _is_damaged(file: Path) -> bool:
    """Whether a file of tensors that the trainer resumes from cannot be read. The tensors themselves are not."""
    if not file.is_file() or not any(file.match(pattern) for pattern in _TENSOR_FILES):
        return False
    try:
        with safe_globals():  # the state of NumPy's generator, in rng_state
            for _ in stored_tensors(os.fspath(file)):
                pass
    except Exception as error:  # torch.load raises anything where bytes of a pickle are wrong
        raise_bug(error, (Exception,))
        return True
    return False


def check_adapters(model: PreTrainedModel, names: Sequence[str] | None, option: str) -> None:
    """Refuses names of layers that the model does not have; PEFT ignores them if another name matches.

    Args:
        model: without adapters.
        names: ends of module names, None, or "all-linear". The default `LORA_TARGETS` covers every kind of DCFormer
            and may name layers that a model lacks.
        option: the command-line option, for messages.

    Raises:
        DCFormerError: naming the first that matches no module.
    """
    if names is None or names == "all-linear" or names == LORA_TARGETS:
        return
    modules = [f".{name}" for name, _ in model.named_modules()]
    for name in names:
        if not any(module.endswith(f".{name}") for module in modules):
            raise DCFormerError(
                f"{option} names {name!r}, which is not a layer of the model: expected ends of their names, such as "
                f"{', '.join(LORA_TARGETS)}"
            )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, rows: Rows, own: str | None) -> None:
    """Refuses a tokenizer that does not belong to the model, or does not know the data's words.

    Args:
        tokenizer: the tokenizer to train with.
        model: for the size of its vocabulary.
        rows: from `check_rows`.
        own: the model's own `tokenizer.json`, whose vocabulary must match, or None.

    Raises:
        DCFormerError: naming what differs.
    """
    size: Any = model.get_input_embeddings().num_embeddings
    if (
        tokenizer.vocab_size > size
    ):  # added tokens, such as GPT-NeoX's runs of spaces, do not count: rows are checked for them
        raise DCFormerError(
            f"the tokenizer {tokenizer.name_or_path} has {tokenizer.vocab_size} tokens, the model's vocabulary has "
            f"{size}: use the model's own tokenizer (leave out --tokenizer), or a larger vocab_size for a new model"
        )
    if own is not None:
        vocabulary, other = Tokenizer.from_file(own).get_vocab(), tokenizer.get_vocab()
        if changed := sorted(token for token, index in vocabulary.items() if other.get(token) != index):
            raise DCFormerError(
                f"the tokenizer {tokenizer.name_or_path} is not the model's: {len(changed)} of its {len(vocabulary)} "
                f"tokens, such as {changed[0]!r}, have another id or none. Leave out --tokenizer"
            )
    if tokenizer.unk_token_id is None:
        return
    ids = [token for row in rows.take(_SAMPLE_ROWS) for text in _texts(row) for token in tokenizer(text)["input_ids"]]
    unknown = ids.count(tokenizer.unk_token_id) / max(1, len(ids))
    if unknown > _MOST_UNKNOWN:
        raise DCFormerError(
            f"the tokenizer {tokenizer.name_or_path} does not know {unknown:.0%} of the tokens of the first rows: it "
            "is not made for this data, and the model would learn nothing"
        )


def check_chat_template(tokenizer: PreTrainedTokenizerBase, training: TrainingConfig, *parts: Rows | None) -> None:
    """Refuses conversations without a chat template to write them as text.

    Args:
        tokenizer: the tokenizer to train with.
        training: for `chat_template_path`.
        parts: rows from `check_rows`, or None.

    Raises:
        DCFormerError: naming the tokenizer, and how a template is given.
    """
    if tokenizer.chat_template or training.chat_template_path:
        return
    for rows in parts:
        if rows is not None and _are_conversations(rows):
            raise DCFormerError(
                f"the rows are conversations, and the tokenizer {tokenizer.name_or_path} has no chat template: give "
                "one with --chat_template_path, such as examples/data/chat_template.jinja"
            )


def check_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
    taken: PreTrainedTokenizerBase | None,
    training: TrainingConfig,
    *parts: Rows | None,
) -> None:
    """Refuses texts without a token to end them, and rows without one to fill batches up with.

    Args:
        tokenizer: the tokenizer to train with.
        taken: the one that `chat_template_path` names, if it names one: TRL takes over its `eos_token` with its
            template, even where it has none or another is asked for.
        training: for `eos_token` and `pad_token`.
        parts: rows from `check_rows`, or None.

    Raises:
        DCFormerError: naming the tokenizer, the token and its option.
    """
    if (training.eos_token or tokenizer.eos_token) if taken is None else taken.eos_token:
        return
    if any(rows is not None and not _are_conversations(rows) for rows in parts):
        if taken is not None:
            raise DCFormerError(
                f"--chat_template_path {training.chat_template_path}: this tokenizer, of which TRL takes over the "
                "eos_token, has none, with which each text is ended: set one, or name its template alone, a .jinja file"
            )
        raise DCFormerError(
            f"the tokenizer {tokenizer.name_or_path} has no eos_token, with which each text is ended: set one, or name "
            "a token of its vocabulary with --eos_token"
        )
    if not (training.pad_token or tokenizer.pad_token):
        neither = "no eos_token" if taken is None else f"{taken.name_or_path} no eos_token"
        raise DCFormerError(
            f"the tokenizer {tokenizer.name_or_path} has no pad_token, and {neither} to fill rows up with in its "
            "place: set one, or name a token of its vocabulary with --pad_token"
        )


def _are_conversations(rows: Rows) -> bool:
    return any(isinstance(value, list) for value in next(iter(rows)).values())


def _texts(row: Mapping[str, Any]) -> Iterable[str]:
    for value in row.values():
        yield from [value] if isinstance(value, str) else [turn["content"] or "" for turn in value]


def longest(training: TrainingConfig, limit: int, streaming: bool) -> int | None:
    """The length to which rows are packed or truncated.

    Args:
        training: for `max_length` and `packing`.
        limit: the model's `max_position_embeddings`.
        streaming: whether rows are read while training, so that their lengths are not known before.

    Returns:
        `max_length`; if not given, the limit for packed or streamed rows and None (no truncation) for others.

    Raises:
        DCFormerError: when `max_length` is beyond the limit, or not positive.
    """
    if training.max_length is None:
        return limit if training.packing or streaming else None
    if not 0 < training.max_length <= limit:
        raise DCFormerError(
            f"max_length is {training.max_length}: expected 1 to {limit}, the model's max_position_embeddings"
        )
    return training.max_length


def check_tokenized(trainer: SFTTrainer) -> None:
    """Refuses tokenized rows that the model cannot read, and rows that all have nothing to learn from.

    Args:
        trainer: with prepared rows; a stream is read up to the first row with something to learn from.

    Raises:
        DCFormerError: naming the first row (not of a stream) that is longer than `max_position_embeddings` or has a
            token beyond the vocabulary; or when no training row, or no held-out row, has a token with a loss other
            than the end of the text.
    """
    parts = {"training": trainer.train_dataset, "held-out": trainer.eval_dataset}
    end = trainer.processing_class.eos_token_id
    without = torch.tensor([-100] if end is None else [-100, end])
    for name, rows in parts.items():
        if rows is None:
            continue
        if isinstance(rows, Dataset):
            _check_readable(rows, name, trainer.model.config, trainer.processing_class)
        if all(torch.isin(trainer.data_collator([row])["labels"][:, 1:], without).all() for row in rows):
            raise DCFormerError(
                f"no {name} row has a token to learn from: all texts or completions are empty, or prompts leave no "
                "room for them within --max_length"
            )


def _check_readable(rows: Dataset, name: str, config: DCFormerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    limit, size = config.max_position_embeddings, config.vocab_size
    start = 0
    for batch in rows.select_columns("input_ids").with_format("arrow").iter(1000):
        ids = batch["input_ids"].combine_chunks()
        lengths = ids.value_lengths()
        if (pyarrow.compute.max(lengths).as_py() or 0) > limit:
            index = pyarrow.compute.index(pyarrow.compute.greater(lengths, limit), True).as_py()
            raise DCFormerError(
                f"{name} row {start + index} has {lengths[index]} tokens, more than the model's "
                f"max_position_embeddings {limit}: truncate rows by --max_length {limit}, or lose nothing by --packing"
            )
        if (pyarrow.compute.max(ids.flatten()).as_py() or 0) >= size:
            index, token = next((i, t) for i, row in enumerate(ids.to_pylist(), start) for t in row if t >= size)
            raise DCFormerError(
                f"{name} row {index} has the token {tokenizer.convert_ids_to_tokens(token)!r} with id {token}, the "
                f"model's vocabulary has {size}: use the model's own tokenizer, or leave such rows out"
            )
        start += len(ids)
