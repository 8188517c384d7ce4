"""The command line `dcformer-convert`; each script in `conversion_scripts/` is one of its subcommands."""

import argparse
from collections.abc import Sequence

from . import ends_quietly

# As `dcformer.conversion` and `dcformer.formats` have them; a test compares them.
_DTYPES = ("float32", "bfloat16", "float16")
_ARRAY_FORMATS = ("maxtext", "pax")
_FORMATS = ("native", "hub", *_ARRAY_FORMATS)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-nonfinite", action="store_true", help="keep NaN and infinity instead of refusing them")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")


def _add_safetensors_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="DIR", help="model folder to create")
    parser.add_argument(
        "--dtype", default="keep", choices=["keep", *_DTYPES], help="of the tensors (default: each as stored)"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default 5GB)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer to save with the model")
    _add_common(parser)


def _jax_to_safetensors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="root with steps, a step, or its state")
    parser.add_argument("--config", metavar="FILE", help="what shapes do not determine: JSON or YAML, may be partial")
    parser.add_argument("--step", type=int, metavar="N", help="which step (default: the last)")
    parser.add_argument("--format", default="auto", choices=["auto", *_ARRAY_FORMATS])
    _add_safetensors_output(parser)


def _safetensors_to_jax(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, metavar="DIR", help="checkpoint root to create")
    parser.add_argument("--format", required=True, choices=_ARRAY_FORMATS)
    parser.add_argument(
        "--ocdbt", action=argparse.BooleanOptionalAction, default=False, help="one OCDBT store, or a folder per array"
    )
    parser.add_argument("--with-train-state", action="store_true", help="also write the step and zero Adam moments")
    parser.add_argument(
        "--dtype",
        default="keep",
        choices=["keep", "trainer", *_DTYPES],
        help="of the arrays (default: each as stored; trainer: qkw and static in bfloat16, all else float32)",
    )
    parser.add_argument("--step", type=int, default=0, metavar="N", help="number of the step (default 0)")
    parser.add_argument("--layers-per-block", type=int, metavar="P", help="default: the period of the layer pattern")
    parser.add_argument("--padded-vocab-size", type=int, metavar="ROWS", help="rows of the embedding (Pax)")
    _add_common(parser)


def _hub_to_safetensors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="folder in the hub format")
    _add_safetensors_output(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="checkpoint of any format")
    parser.add_argument("second", metavar="B", help="another")
    parser.add_argument("--atol", type=float, default=0.0, help="tolerated difference of tensors (default 0)")
    parser.add_argument("--logits-atol", type=float, default=5e-5, help="tolerated difference of logits (default 5e-5)")
    parser.add_argument("--tokens", nargs="+", metavar="IDS", help="token ids, or a .npy file, to compare logits on")
    parser.add_argument("--num-tokens", type=int, default=64, help="random tokens otherwise; 0: no logits (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.add_argument("--all", action="store_true", help="list equal tensors too")
    for side in ("first", "second"):
        parser.add_argument(f"--{side}-config", metavar="FILE", help="of a JAX checkpoint, as for jax-to-safetensors")
        parser.add_argument(f"--{side}-step", type=int, metavar="N", help="of a JAX checkpoint with several")
        parser.add_argument(f"--{side}-format", default="auto", choices=["auto", *_FORMATS])
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")


_COMMANDS = {
    "jax-to-safetensors": (_jax_to_safetensors, "MaxText or Pax checkpoint -> model folder"),
    "safetensors-to-jax": (_safetensors_to_jax, "model folder -> MaxText or Pax checkpoint"),
    "hub-to-safetensors": (_hub_to_safetensors, "folder in the hub format (the authors' repositories) -> model folder"),
    "verify": (_verify, "compare two checkpoints of any formats"),
}


@ends_quietly
def main(argv: Sequence[str] | None = None, command: str | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; the process's when not given.
        command: the subcommand, for a script that offers only that one.

    Returns:
        0, or 1 on an error or a difference. Wrong usage exits with 2.
    """
    if command is not None:
        add_arguments, about = _COMMANDS[command]
        parser = argparse.ArgumentParser(description=about)
        add_arguments(parser)
    else:
        about = "Conversions between checkpoint formats: model folders, the authors' repositories (hub), MaxText, Pax."
        parser = argparse.ArgumentParser(prog="dcformer-convert", description=about)
        subparsers = parser.add_subparsers(dest="command", required=True)
        for name, (add_arguments, about) in _COMMANDS.items():
            add_arguments(subparsers.add_parser(name, help=about, description=about))
    args = parser.parse_args(argv)
    if command is None:
        command = vars(args).pop("command")

    from dcformer.conversion.cli import run

    return run(command, args)


if __name__ == "__main__":
    raise SystemExit(main())
