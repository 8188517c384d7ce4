"""Implements `dcformer-selfcheck`: do the fused kernels match their definition on this machine?

dcformer-selfcheck --model FOLDER                                 # on a GPU: the check that models run themselves
TRITON_INTERPRET=1 dcformer-selfcheck --model FOLDER --device cpu # a trial without one
"""

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

from .errors import CONFIG_ERRORS, DCFormerError, refused, reports


@reports
def run(options: argparse.Namespace) -> int:
    """Runs the check and prints a table.

    Args:
        options: of the command line, as `dcformer_commands.selfcheck` reads them.

    Returns:
        0 when every result is within its bound, otherwise 1.
    """
    import torch
    from transformers import AutoConfig

    from .configuration_dcformer import DCFormerConfig
    from .kernels.limits import is_interpreted, unsupported_reason
    from .kernels.overflow import NOTHING, Beyond
    from .kernels.selfcheck import kinds
    from .loading import named_device
    from .vision.configuration_dcvit import DCViTConfig

    config: Any = None
    if options.model:
        file = Path(options.model) / "config.json"
        name = str(file) if file.exists() else options.model
        with refused(OSError, *CONFIG_ERRORS, what=name, loads=options.model):
            config = AutoConfig.from_pretrained(options.model)
    else:
        with refused(ValueError):
            config = DCFormerConfig.from_preset(options.preset)
    if not isinstance(config, DCFormerConfig | DCViTConfig):
        raise DCFormerError(
            f"{options.model} is a {config.model_type!r} model: expected one of this package, such as 'dcformer', "
            "'dcpythia' or 'dcvit'."
        )
    if options.device is not None:
        device = named_device(options.device, "--device cpu, with TRITON_INTERPRET=1 set before the start")
    elif is_interpreted():
        device = torch.device("cpu")
    else:  # without one, the kernels say what is missing
        device = named_device("cuda") if torch.cuda.is_available() else torch.device("cuda", 0)
    if (reason := unsupported_reason(device=device)) is not None:
        trial = "" if torch.cuda.is_available() else "; here, TRITON_INTERPRET=1 and --device cpu are for a trial"
        raise DCFormerError(f"{reason}{trial}")
    print(_where(device))
    passed, found = True, NOTHING
    for mark in options.beyond:
        found |= Beyond[mark.upper()]
    for dtype in options.dtype:
        for kind in kinds(config, dtype, "float32" if options.autocast else None, found):
            passed &= _check_kind(device, kind)
    print("passed" if passed else "FAILED: models whose attn_implementation is unset use 'dcformer_chunked' here")
    return 0 if passed else 1


def _where(device: Any) -> str:
    """The machine, in one line, and where verdicts are kept."""
    from .kernels.limits import is_interpreted
    from .kernels.verdicts import cache_folder, machine

    if is_interpreted():
        return "Triton's interpreter, which says nothing about a GPU; nothing is kept"
    parts = ", ".join(f"{name} {value}" for name, value in machine(device).items())
    return f"{parts}\nverdicts: {cache_folder() / 'selfcheck'}"


def _check_kind(device: Any, kind: Any) -> bool:
    """Checks a kind of layer and prints the table of its results."""
    from .kernels.selfcheck import check_and_keep

    print(f"\n{kind}", flush=True)
    begin = time.perf_counter()
    try:
        results, passed, _ = check_and_keep(device, kind)
    except Exception as error:  # compilers and drivers raise anything, and this is what the user asked about
        print(f"  cannot run: {type(error).__name__}: {error}")
        traceback.print_exc()  # or a bug of ours
        return False
    width = max(len(check.name) for check in results)
    print(f"  {'':<{width}}  {'measure':<8}{'error':>10}{'eager':>10}{'allowed':>10}")
    for check in results:
        numbers = f"{check.error:>10.2e}{check.eager:>10.2e}{check.allowed:>10.2e}"
        print(f"  {check.name:<{width}}  {check.measure:<8}{numbers}  {'ok' if check.passed else 'OFF'}")
    off = sum(not check.passed for check in results)
    print(f"  {len(results)} results, {off} beyond what is allowed, {time.perf_counter() - begin:.1f} s")
    return passed


if __name__ == "__main__":
    from dcformer_commands.selfcheck import main

    raise SystemExit(main())
