"""The command line `dcformer-dha`: fewer key and value heads from a checkpoint."""

import argparse
from collections.abc import Sequence

from . import ends_quietly

# As `dcformer.dha` has them; a test compares them.
_SCORES = ("weights", "function", "operator", "cka", "uniform")
_ALLOCATIONS = ("uniform", "root", "score", "displacement")
_TRAINED = ("all", "attention", "none")
_DTYPES = ("bfloat16", "float16", "float32")


def _add_data(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--data", required=required, metavar="FILE", help="texts: file, pattern or name (docs/training)"
    )
    parser.add_argument("--column", metavar="NAME", help="of the texts (default: text)")
    parser.add_argument("--length", type=int, help="tokens of a row (default: 512, or the model's context if shorter)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a batch and process (default: %(default)s)")
    parser.add_argument("--accumulation", type=int, default=1, help="batches of a step (default: %(default)s)")
    parser.add_argument("--save-steps", type=int, default=100, help="between states to resume from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", choices=("auto", *_DTYPES), help="to load the model in")


def _search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the source")
    parser.add_argument("--output", required=True, metavar="FILE", help="plan to write, JSON")
    parser.add_argument(
        "--kv-ratio", type=float, default=0.25, help="at most this share of heads is kept (default: %(default)s)"
    )
    parser.add_argument("--score", choices=_SCORES, default="weights", help="distance of heads (default: %(default)s)")
    parser.add_argument("--allocation", choices=_ALLOCATIONS, default="uniform", help="counts (default: %(default)s)")
    parser.add_argument("--tie", action="store_true", help="keys and values share groups: for plain GQA")
    parser.add_argument("--head-blocks", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=240, help="where the score trains (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="where the score trains (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the plan if it exists")
    _add_data(parser, required=False)


def _fuse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the source")
    parser.add_argument("--plan", required=True, metavar="FILE", help="of search")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--steps", type=int, default=800, help="closing included (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak, of the model (default: %(default)s)")
    parser.add_argument("--mixer-lr", type=float, default=1e-2, help="of the operators and λ (default: %(default)s)")
    parser.add_argument("--train", choices=_TRAINED, default="all", help="parameters (default: %(default)s)")
    parser.add_argument("--closing-steps", type=int, help="the last steps (default: 60, or all if there are fewer)")
    parser.add_argument("--margin-steps", type=int, default=200, help="after which heads may not differ")
    parser.add_argument("--stop-at-loss", type=float, help="of fusion; the paper's 1e-3, with --closing-steps 0")
    parser.add_argument("--eval-data", metavar="FILE", help="held-out texts; by default the last 5 %% of --data")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    _add_data(parser, required=True)


def _fold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="what fuse wrote; or a source, with --plan")
    parser.add_argument("--plan", metavar="FILE", help="pool a source by the mean of this plan's groups")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--accept-gap", action="store_true", help="fold operators that are not closed")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default 5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")


def _expand(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="a folded model")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--to", choices=("mha", "gqa"), default="mha", help="mha: for anything; gqa: of tied plans")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="a folded model")
    parser.add_argument("--context", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the cache (default: %(default)s)")


_COMMANDS = {
    "search": (_search, "which heads become one -> a plan"),
    "fuse": (_fuse, "train a model until the heads of each group are equal"),
    "fold": (_fold, "make a head of each group, by weights alone, streaming"),
    "expand": (_expand, "a folded model as one without head maps, for other programs"),
    "report": (_report, "heads per layer, bytes per token, parameters of a folded model"),
}


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: the arguments; the process's when not given.

    Returns:
        0, or 1 on an error, which is printed as one line. Wrong usage exits with 2.
    """
    about = "Fewer key and value heads from a checkpoint (docs/dha.md): search, fuse, fold, report."
    parser = argparse.ArgumentParser(prog="dcformer-dha", description=about)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, (add_arguments, what) in _COMMANDS.items():
        add_arguments(subparsers.add_parser(name, help=what, description=what))
    options = parser.parse_args(arguments)

    from dcformer.dha.cli import run

    return run(options)


if __name__ == "__main__":  # accelerate launch -m dcformer_commands.dha
    raise SystemExit(main())
