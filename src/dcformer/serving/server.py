"""The command line ``dcformer-serve``: ``transformers serve`` with DCFormer registered. All options are the library's.

``python -m dcformer.serving`` is the same. Bad requests are refused with their reason (`requests`).
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import dcformer  # registers the model types: the server loads them without remote code

from ..errors import DCFormerError, first_line, loading_reason, raise_bug
from ..loading import LOADING_ERRORS, check_parameters, damaged_file, named_device, refuse_mixtures
from ..modules.interface import generate_without_cache
from ..modules.saving import from_pretrained_any, generates_without_cache, is_converted
from .requests import CHAT, RESPONSES, SOMETIMES_IGNORED, TEXT, BadRequestError, RequestChecks, find_misfit

_PROGRAM = "dcformer-serve"
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # what `--device` may name beside devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until it is stopped.

    Args:
        arguments: the arguments of ``transformers serve``; the process's when not given.

    Returns:
        0, or 1 with a line that says why the server does not start: its libraries are not installed, the model cannot
        be loaded, or continuous batching is requested. Our models refuse the latter, so that every request would end in
        an internal error. Wrong usage exits with 2. A bug keeps its traceback.
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
    app = typer.Typer(add_completion=False)
    app.command(name=_PROGRAM)(Serve)
    try:
        with _own_application():
            app(args=arguments, prog_name=_PROGRAM, standalone_mode=True)
    except (ImportError, *LOADING_ERRORS) as error:
        raise_bug(error, (Exception,))
        damaged = (damaged_file(argument, error) for argument in arguments if os.path.isdir(argument))
        reason = next(filter(None, damaged), None) or first_line(error)
        print(
            f"error: {_PROGRAM} {' '.join(arguments)}: {reason} - expected a folder (or a name on the Hub) with model "
            "and tokenizer, and options that fit them.",
            file=sys.stderr,
        )
        return 1
    return 0


@contextmanager
def _own_application() -> Iterator[None]:
    """Within this context, `Serve` builds a server that loads and lists our models, and checks requests.

    `Serve` imports its parts by name when it is called; two of them are replaced for that time.
    """
    from fastapi.middleware import Middleware
    from huggingface_hub.errors import CacheNotFound
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.chat_completion import UNUSED_CHAT_COMPLETION_FIELDS

    library_manager, library_build = model_manager.ModelManager, server.build_server

    class ModelManager(library_manager):  # type: ignore[misc, valid-type]
        """Loads our causal models by their type; the library's manager looks classes up by name in `transformers`."""

        def __init__(self, *args: Any, **kwargs: Any):
            if kwargs.get("device", "auto") not in _DEVICE_MAPS:
                named_device(kwargs["device"])
            super().__init__(*args, **kwargs)

        def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            model, _, revision = model_id_and_revision.partition("@")
            if os.path.exists(model_id_and_revision):  # a folder, which from Transformers 5.24 on has no revision
                model, revision = model_id_and_revision, ""
            refuse_mixtures(model)
            where = {"revision": revision or None, "trust_remote_code": self.trust_remote_code}
            is_gguf = kwargs.get("gguf_file") is not None
            config = None if is_gguf else AutoConfig.from_pretrained(model, **where)
            is_ours = isinstance(config, dcformer.DCFormerConfig)
            if config is None or not (is_ours or is_converted(config)):
                return super()._load_model(model_id_and_revision, *args, **kwargs)
            try:
                check_parameters(model, config, where)
                named = (config.architectures or [""])[0].removeprefix("FSDP")
                loaded = from_pretrained_any(
                    model,
                    AutoModelForCausalLM if is_ours else getattr(transformers, named, AutoModelForCausalLM),
                    **where,
                    attn_implementation=self.attn_implementation,
                    dtype=self.dtype,
                    device_map=self.device,
                    quantization_config=self.get_quantization_config(),
                    tqdm_class=kwargs.get("tqdm_class"),
                )
            except EOFError as error:  # typer would take it for the end of its own input
                raise DCFormerError(f"a file of {model} ends too early") from error
            if generates_without_cache(config) and loaded.can_generate():
                generate_without_cache(loaded)
            return loaded

        # Before Transformers 5.24, which has `list_models` that does the same.
        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            if self.force_model is not None:  # requests for other models are refused
                return [{"id": self.force_model, "object": "model", "created": started, "owned_by": ""}]
            try:
                return library_manager.get_gen_models(cache_dir)
            except CacheNotFound:  # nothing has been downloaded yet
                return []

    def check_by_model(path: str, handler: Any) -> None:
        """Lets a handler refuse what does not fit the model, as soon as it has loaded or found it."""
        resolve = handler._resolve_model

        def resolve_and_check(body: dict[str, Any]) -> Any:
            given = body.get("model") or handler.model_manager.force_model
            if not given:
                raise BadRequestError("model", "model names none, and this server has no model of its own.")
            try:
                name, model, processor = resolve(body)
            except torch.OutOfMemoryError:  # no fault of the request
                raise
            except LOADING_ERRORS as error:
                raise_bug(error, (Exception,))
                reason = (os.path.isdir(given) and damaged_file(given, error)) or loading_reason(given, error)
                raise BadRequestError("model", f"model={given!r} cannot be loaded: {reason}") from error
            tokenizer = getattr(processor, "tokenizer", processor)
            has_cache = not generates_without_cache(model.config)
            if fault := find_misfit(path, body, model.config.get_text_config(), tokenizer, has_cache):
                raise BadRequestError(*fault)
            return name, model, processor

        handler._resolve_model = resolve_and_check

    def build_server(*args: Any, **kwargs: Any) -> Any:
        check_by_model(CHAT, args[1])
        check_by_model(TEXT, kwargs["completion_handler"])
        check_by_model(RESPONSES, kwargs["response_handler"])
        application = library_build(*args, **kwargs)
        # innermost, so that refusals get the headers of an answer: a request's id, and those that --enable-cors adds
        ignored = SOMETIMES_IGNORED & UNUSED_CHAT_COMPLETION_FIELDS
        application.user_middleware.append(Middleware(RequestChecks, ignored=ignored))
        return application

    started = int(time.time())
    model_manager.ModelManager, server.build_server = ModelManager, build_server  # type: ignore[misc]
    try:
        yield
    finally:
        model_manager.ModelManager, server.build_server = library_manager, library_build  # type: ignore[misc]


def _missing(what: str) -> str:
    return f"error: {_PROGRAM} needs the server's libraries ({what}): pip install 'dcformer[serve]'"
