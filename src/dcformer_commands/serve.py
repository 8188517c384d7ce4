"""The command line ``dcformer-serve``: that of ``transformers serve``, parsed without importing PyTorch."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from . import ends_quietly

_PROGRAM = "dcformer-serve"


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until it is stopped.

    Args:
        arguments: the arguments of ``transformers serve``; the process's when not given.

    Returns:
        0, or 1 with a line that says why the server does not start. ``--help`` and wrong usage exit with 0 and 2.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if find_spec("typer") is not None:
        _read(arguments)

    from dcformer.serving import main as serve

    return serve(arguments)


def _read(arguments: Sequence[str]) -> None:
    """Exits on ``--help`` and wrong usage; does nothing else."""
    import typer

    serve = _declaration()
    if serve is None:
        return
    app = typer.Typer(add_completion=False)
    app.command(name=_PROGRAM)(serve)
    command: Any = typer.main.get_command(app)
    is_read = False

    def note(**_: Any) -> None:
        nonlocal is_read
        is_read = True

    command.callback = note
    try:
        command.main(args=list(arguments), prog_name=_PROGRAM)
    except SystemExit:
        if not is_read:
            raise


def _declaration() -> Any:
    """The library's server class, usable only for its signature and help; None if it cannot be read.

    Its module imports the rest of Transformers and PyTorch: stand-ins replace them while it is executed.
    """
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return None
    names = ("", ".utils", ".utils.import_utils", ".cli", ".cli.serving", ".cli.serving.utils")
    file = Path(library.origin).parent / "cli" / "serve.py"
    spec = spec_from_file_location("transformers.cli.serve", file)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    with _stand_ins([f"transformers{name}" for name in names]):
        try:
            spec.loader.exec_module(module)
        except Exception:  # another layout of the library: the server itself reads the arguments, slower
            return None
    return getattr(module, "Serve", None)


class _StandIn(ModuleType):
    """A module with every name that is asked for. What it has, and what calling that gives, is another."""

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):  # a module without these is one that was not imported from a file
            raise AttributeError(name)
        return _StandIn(name)

    def __call__(self, *_: Any, **__: Any) -> "_StandIn":
        return self


@contextmanager
def _stand_ins(names: Sequence[str]) -> Iterator[None]:
    """Modules with these names can be imported for a while, and have nothing in them."""
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update({name: _StandIn(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


if __name__ == "__main__":
    raise SystemExit(main())
