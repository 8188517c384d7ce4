"""The command line `dcformer-plan`."""

import argparse
from collections.abc import Sequence

from . import ends_quietly

_ABOUT = "Memory and communication of training a DCFormer on many GPUs (docs/scale_out.md)."
# As `dcformer` and `dcformer.planning` have them; a test compares them.
_PRESETS = (
    "dcformer-405m",
    "dcformer-834m",
    "dcformer-1.4b",
    "dcformer-2.8b",
    "dcformer-6.9b",
    "dcformer-13b",
    "dcformer-33b",
    "dcformer-8b-mgate",
    "dcpythia-2.8b",
    "dcpythia-6.9b",
)
_OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "sgd_momentum")
_IMPLEMENTATIONS = ("dcformer_triton", "dcformer_chunked", "eager")
_GPUS = ("h100", "h200")


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a plan.

    Args:
        arguments: of the command line; the process's when not given.

    Returns:
        0, or 1 on input that cannot be planned: then it prints one line, the reason. Wrong usage exits with 2.
    """
    parser = argparse.ArgumentParser(prog="dcformer-plan", description=_ABOUT)
    parser.add_argument("--preset", choices=_PRESETS, default="dcformer-6.9b", help="sizes (default: %(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the configuration")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share a layer; the rest is FSDP2")
    parser.add_argument("--batch", type=int, default=1, help="sequences per forward pass (default: %(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--accumulation", type=int, default=1, help="passes per optimizer step")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of computation"
    )
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of every layer")
    parser.add_argument("--attention", choices=_IMPLEMENTATIONS, default=_IMPLEMENTATIONS[0])
    parser.add_argument("--gpu", choices=_GPUS, default="h100", help="whose memory (default: %(default)s)")
    parser.add_argument("--memory", type=float, help="GB of a GPU, instead of --gpu")
    options = parser.parse_args(arguments)

    from dcformer.planning import run

    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
