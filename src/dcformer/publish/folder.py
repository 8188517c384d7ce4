"""A folder that is ready for the Hub: ``python -m dcformer.publish MODEL OUT``.

Sharded safetensors with their index, configuration, generation settings, tokenizer with chat template, and a model
card. ``hf upload user/name OUT`` uploads it as it is.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..configuration_dcformer import DCFormerConfig
from ..conversion.output import complete_folder
from ..conversion.sources import FLOATS
from ..errors import ConversionError, DCFormerError, first_line, is_of_package, loading_reason, reports
from ..files import what_is_in_the_way
from ..head_systems.registry import system_class
from ..hub_dcformer import IGNORED_ON_LOAD
from ..loading import LOADING_ERRORS, check_parameters, damaged_file, parameter_names, refuse_mixtures
from ..remote_code import export_remote_code
from ..stored_dcformer import stored_tensors, weight_files
from ..tokens_dcformer import load_tokenizer
from .card import model_card, read_results

# Names in a hub folder that need not be parameters: buffers that are never loaded, and static projections, which may be
# stored identity matrices.
_NO_PARAMETERS = re.compile("|".join([*IGNORED_ON_LOAD, r"\.(?:pre|post)_proj\.w$"]))


class HubFolderError(DCFormerError):
    """An unsuitable model, results file or output, which the user can correct."""


def write_hub_folder(
    model: str | os.PathLike,
    output: str | os.PathLike,
    results: str | os.PathLike | None = None,
    max_shard_size: str = "5GB",
    remote_code: bool = False,
    name: str | None = None,
    license: str | None = None,
) -> Path:
    """Writes a folder for the Hub, completely or not at all.

    Args:
        model: folder of a causal model of this package, or its name on the Hub. Parameters keep their values: all get
            the dtype that holds those of each that is stored, whatever the configuration names.
        output: the new folder; must not exist, or be empty.
        results: results file of lm-eval for the card's table, of this model by its folder or by `name`.
        max_shard_size: largest size of a weight file, such as "100MB".
        remote_code: add the modeling code, for users without this package.
        name: the model's name in the card, usually `user/name`; by default the output folder's name.
        license: identifier for the card, such as "mit".

    Returns:
        The folder. It has a tokenizer if the model's folder has one.

    Raises:
        HubFolderError: when the model, the results or the shard size cannot be used, or the output exists or cannot be
            written. Nothing is left then.
    """
    output = Path(output)
    if (what := what_is_in_the_way(output)) is not None:
        raise HubFolderError(f"{output} exists and {what}: choose another output, or remove it.")
    if not re.fullmatch(r"[1-9]\d*([KMGT]i?B)", max_shard_size):
        raise HubFolderError(
            f"max_shard_size={max_shard_size!r} is not understood: expected a size such as 100MB or 5GB."
        )
    source = os.fspath(model)
    try:
        scores = read_results(results, [source, *([name] if name else [])]) if results is not None else None
    except DCFormerError as error:
        raise HubFolderError(str(error)) from error
    try:
        config = AutoConfig.from_pretrained(source)
    except LOADING_ERRORS as error:
        reason = damaged_file(source, error) or loading_reason(source, error)
        raise HubFolderError(
            f"{source} has no readable configuration ({reason}): expected a folder written by "
            "save_pretrained, or the name of a model on the Hub."
        ) from error
    if not (isinstance(config, DCFormerConfig) and is_of_package(type(config))):
        raise HubFolderError(
            f"{source} is a model of type {config.model_type!r}: expected a causal language model of this package "
            "(dcformer, dcpythia, dha, dcformer_heads). Others write sharded folders by their own "
            "save_pretrained(folder, max_shard_size=...), without a model card."
        )
    system = system_class(getattr(config, "head_system", "plain"))
    if not is_of_package(system):
        raise HubFolderError(
            f"{source} has head_system={config.head_system!r}, which is {system.__module__}.{system.__name__} and no "
            "part of this package: a model card would not say how to load it. Save it by its own save_pretrained."
        )
    try:
        refuse_mixtures(source)
    except DCFormerError as error:
        raise HubFolderError(str(error)) from error
    try:
        check_parameters(source, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=_stored_dtype(source, config))
    except LOADING_ERRORS as error:
        raise HubFolderError(
            f"{source} cannot be loaded: {damaged_file(source, error) or first_line(error)}"
        ) from error
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in loaded.state_dict().values())
    config.dtype = loaded.dtype  # config.json need not have it
    card = model_card(config, name or output.resolve().name, scores, license, remote_code)
    try:
        with complete_folder(output, nbytes) as work:
            loaded.save_pretrained(work, max_shard_size=max_shard_size)
            _save_tokenizer(source, work)
            if remote_code:
                export_remote_code(work)
            card.save(work / "README.md")
    except ConversionError as error:
        raise HubFolderError(str(error)) from error
    return output


def _stored_dtype(source: str, config: Any) -> torch.dtype | str:
    """The dtype that holds the values of all stored parameters; "auto" where the files have none of ours."""
    if getattr(config, "quantization_config", None) is not None:
        return "auto"
    known = parameter_names(config)
    stored = {name: read().dtype for file in weight_files(source, {}) for name, _, read in stored_tensors(file)}
    is_authors = "tok_embeddings.weight" in stored
    dtypes = {
        dtype
        for name, dtype in stored.items()  # others, as tables of RoPE, are not loaded
        if name in known or f"model.{name}" in known or (is_authors and not _NO_PARAMETERS.search(name))
    }
    return reduce(torch.promote_types, dtypes & {*FLOATS}) if dtypes & {*FLOATS} else "auto"


def _save_tokenizer(source: str, folder: Path) -> None:
    try:
        tokenizer = load_tokenizer(source, {})
    except LOADING_ERRORS as error:
        damaged = damaged_file(source, error)
        if (Path(source) / "tokenizer.json").is_file():
            reason = damaged or f"{type(error).__name__}: {first_line(error)}"
            raise HubFolderError(
                f"the tokenizer of {source} cannot be read ({reason}): replace it, or take tokenizer.json out of the "
                "folder."
            ) from error
        print(f"no tokenizer is saved: {first_line(error)}", file=sys.stderr)
        return
    tokenizer.save_pretrained(folder)


@reports
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: the arguments; the process's when not given.

    Returns:
        0, or 1 on an error that the user can correct. Wrong usage exits with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m dcformer.publish", description=__doc__)
    parser.add_argument("model", help="folder of the model, or its name on the Hub")
    parser.add_argument("output", help="folder to write; must not exist, or be empty")
    parser.add_argument("--results", help="results_*.json of dcformer-eval --output_path, for the card's table")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a weight file (%(default)s)")
    parser.add_argument("--remote_code", action="store_true", help="add the modeling code for users without dcformer")
    parser.add_argument("--name", help="name of the model in the card, usually user/name (the output folder's name)")
    parser.add_argument("--license", help="license identifier for the card, such as mit (none)")
    args = parser.parse_args(arguments)
    with torch.no_grad():
        output = write_hub_folder(**vars(args))
    files = sorted(path.name for path in output.iterdir())
    print(f"{output}: {len(files)} files: {', '.join(files)}")
    return 0


__all__ = ["HubFolderError", "main", "write_hub_folder"]
