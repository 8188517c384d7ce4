"""The command line ``dcformer-serve``: ``transformers serve`` with DCFormer registered. All options are the library's.

``python -m dcformer.serve`` is the same. Bad requests are refused with their reason (`serve_requests`).
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers

import dcformer  # registers the model types: the server loads them without remote code

from .conversion.errors import first_line
from .serve_requests import SOMETIMES_READ_OVER, RequestChecks

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
        with _own_application():
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


@contextmanager
def _own_application() -> Iterator[None]:
    """In here the server (5.23) that is built checks its requests, and lists the models that it answers for."""
    from huggingface_hub.errors import CacheNotFound
    from transformers.cli.serving import server
    from transformers.cli.serving.chat_completion import UNUSED_CHAT_COMPLETION_FIELDS

    library_build = server.build_server

    def build_server(model_manager: Any, *args: Any, **kwargs: Any) -> Any:
        started, models_in_cache = int(time.time()), model_manager.get_gen_models

        def models() -> list[dict[str, Any]]:
            if model_manager.force_model is not None:  # requests for another one are refused
                return [{"id": model_manager.force_model, "object": "model", "created": started, "owned_by": ""}]
            try:
                return models_in_cache()
            except CacheNotFound:  # nothing has been downloaded yet
                return []

        model_manager.get_gen_models = models
        application = library_build(model_manager, *args, **kwargs)
        read_over = SOMETIMES_READ_OVER & UNUSED_CHAT_COMPLETION_FIELDS
        application.add_middleware(RequestChecks, read_over=read_over)
        return application

    server.build_server = build_server
    try:
        yield
    finally:
        server.build_server = library_build


def _missing(what: str) -> str:
    return f"error: {_PROGRAM} needs the server's libraries ({what}): pip install 'dcformer[serve]'"


if __name__ == "__main__":
    raise SystemExit(main())
