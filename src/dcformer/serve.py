"""The command line ``dcformer-serve``: ``transformers serve`` with DCFormer registered. All options are the library's.

``python -m dcformer.serve`` is the same.
"""

import sys
from collections.abc import Sequence

import transformers

import dcformer  # registers the model types: the server loads them without remote code

from .conversion.errors import first_line

_PROGRAM = "dcformer-serve"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until it is stopped.

    Args:
        arguments: the arguments of ``transformers serve``; the process's when not given.

    Returns:
        0, or 1 with a line that says why there is no server: what it needs is not installed, the model cannot be loaded
        (it is before the server starts), or continuous batching is asked for, which our models refuse: the server would
        start, and answer every request with an internal error. Wrong usage exits with 2.
    """
    try:
        import typer
        from transformers.cli.serve import Serve
        from transformers.utils.import_utils import is_serve_available
    except ModuleNotFoundError as error:
        print(_missing(f"no module {error.name!r}"), file=sys.stderr)
        return 1
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not is_serve_available() and "--help" not in arguments:
        print(_missing("one of fastapi, openai, pydantic and uvicorn is absent"), file=sys.stderr)
        return 1
    if "--continuous-batching" in arguments:
        print(
            f"error: {_PROGRAM} has no --continuous-batching: DCFormer's keys and values carry composition weights, "
            "which the library's paged cache has no room for. Leave the option out: requests are answered one by one. "
            "For other models, use `transformers serve`.",
            file=sys.stderr,
        )
        return 1
    _name_models()
    app = typer.Typer(add_completion=False)
    app.command(name=_PROGRAM)(Serve)
    try:
        app(args=arguments, prog_name=_PROGRAM, standalone_mode=True)
    except (ImportError, OSError, ValueError) as error:
        print(
            f"error: {_PROGRAM} {' '.join(arguments)}: {first_line(error)} - expected a folder (or a name on the Hub) "
            "with model and tokenizer, and options that fit them.",
            file=sys.stderr,
        )
        return 1
    return 0


def _name_models() -> None:
    """Lets the server (5.23) find our causal models: it looks classes up by name in `transformers`."""
    for model in (dcformer.DCFormerForCausalLM, dcformer.DCPythiaForCausalLM):
        if not hasattr(transformers, model.__name__):
            setattr(transformers, model.__name__, model)


def _missing(what: str) -> str:
    return f"error: {_PROGRAM} needs the server's libraries ({what}): pip install 'dcformer[serve]'"


if __name__ == "__main__":
    raise SystemExit(main())
