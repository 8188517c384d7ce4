"""The command lines: help and wrong usage are answered before PyTorch is imported, and choices are the package's."""

import importlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import REPOSITORY

from dcformer.analysis.diversity import FORMS
from dcformer.analysis.plots import THEMES
from dcformer.conversion.convert import DTYPES
from dcformer.dha.fusion import TRAINED
from dcformer.dha.search import ALLOCATIONS, SCORES
from dcformer.formats import FORMATS, array_formats
from dcformer.planning import GPUS, IMPLEMENTATIONS, OPTIMIZERS
from dcformer.presets_dcformer import PRESETS
from dcformer_commands import analyze, convert, dha, plan

# Runs a command and reports what it has imported. `dcformer` itself is not there to be imported: nothing may need it.
PROGRAM = """
import importlib, json, sys
sys.modules["dcformer"] = None
module, arguments = sys.argv[1], sys.argv[2:]
sys.argv = [module, *arguments]
main = importlib.import_module(f"dcformer_commands.{module}").main
try:
    status = main()
except SystemExit as stop:
    status = stop.code
heavy = [name for name in ("torch", "transformers", "jax") if name in sys.modules]
print(json.dumps([status, heavy]), file=sys.stderr)
"""
# The same, and Ctrl-C comes when `dcformer` is imported.
INTERRUPTED = PROGRAM.replace(
    'sys.modules["dcformer"] = None',
    """
class Interrupt:
    def find_spec(name, *_):
        if name == "dcformer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt)
""",
)
SUBCOMMANDS = ("jax-to-safetensors", "safetensors-to-jax", "hub-to-safetensors", "verify")
HELP = [
    ("convert", "--help", "verify"),
    *(("convert", f"{name} --help", "--no-progress") for name in SUBCOMMANDS),
    ("dha", "--help", "report"),
    *(("dha", f"{name} --help", "--model") for name in ("search", "fuse", "fold", "expand", "report")),
    ("plan", "--help", "--tensor-parallel"),
    ("selfcheck", "--help", "--preset"),
    ("analyze", "--help", "--target"),
    ("eval", "--help", "validate"),
    ("eval", "", "validate"),
    ("eval", "run --help", "--model_args"),
    ("eval", "ls --help", "tasks"),
    ("eval", "validate --help", "--tasks"),
    ("serve", "--help", "--port"),
]
WRONG = [
    ("convert", "", "required: command"),
    ("convert", "jax-to-safetensor", "invalid choice: 'jax-to-safetensor'"),
    ("convert", "hub-to-safetensors --checkpoint a --output b --dtype bf17", "bf17.*keep.*float32.*bfloat16.*float16"),
    ("convert", "verify a", "required: B"),
    ("dha", "", "required: command"),
    ("dha", "search --model a --output b --score mse", "mse.*weights.*function.*operator.*cka.*uniform"),
    ("dha", "fuse --model a --plan b --output c", "required: --data"),
    ("plan", "--preset dcformer-7b", "invalid choice: 'dcformer-7b'.*dcformer-6.9b"),
    ("plan", "--dtype bf17", "bf17.*bfloat16.*float16.*float32"),
    ("analyze", "m --output o", "give --text or --image, or --diversity"),
    ("analyze", "m --text t", "--output is required"),
    ("analyze", "m --diversity --target t", "--diversity prints, and looks at weights only: leave out --target"),
    ("plan", "--gpus many", "invalid int value: 'many'"),
    ("eval", "run --tasks a --no-such-option", "unrecognized arguments: --no-such-option"),
    ("serve", "--no-such-option", "No such option.*--no-such-option"),
    ("serve", "--port x", "--port"),
]
needed = {"eval": "lm_eval", "serve": "typer"}


def run(module, words):
    if module in needed:
        pytest.importorskip(needed[module])
    command = [sys.executable, "-c", PROGRAM, module, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *errors, last = done.stderr.strip().splitlines()
    return *json.loads(last), done.stdout, " ".join(errors)


@pytest.mark.parametrize(("module", "words", "expected"), HELP, ids=lambda value: value)
def test_help_imports_nothing_heavy(module, words, expected):
    status, heavy, out, _ = run(module, words)
    assert (status or 0, heavy) == (0, []) and expected in out


@pytest.mark.parametrize("module", ["selfcheck", "planning"])
def test_modules_are_their_commands(module):
    """As a package with a command is: `python -m` of one without would do nothing, and pass."""
    done = subprocess.run([sys.executable, "-m", f"dcformer.{module}", "--help"], capture_output=True, timeout=120)
    assert done.returncode == 0 and b"usage:" in done.stdout


@pytest.mark.parametrize(("module", "words", "message"), WRONG, ids=lambda value: value)
def test_wrong_usage_imports_nothing_heavy(module, words, message):
    status, heavy, _, errors = run(module, words)
    assert (status, heavy) == (2, []) and re.search(message, errors)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("analyze", "m --diversity"),
        ("convert", "verify a b"),
        ("dha", "report --model a"),
        ("eval", "ls tasks"),
        ("plan", ""),
        ("selfcheck", ""),
        ("serve", "m"),
    ],
)
def test_interrupted_while_importing(module, words, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", INTERRUPTED)
    status, _, out, errors = run(module, words)
    assert (status, out, errors.splitlines()[-1]) == (130, "", "interrupted")


COMMAND = """
import sys
from dcformer_commands import ends_quietly
@ends_quietly
def main():
    {}
    return 0
sys.exit(main())
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("length", [10, 100_000])
def test_nobody_reads_what_is_printed(length, unbuffered):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", COMMAND.format(f"print('a' * {length})")]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_pipe_of_something_else_keeps_its_traceback():
    command = [sys.executable, "-c", COMMAND.format("raise BrokenPipeError('of another')")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("BrokenPipeError: of another\n")


def test_choices_are_those_of_the_package():
    assert set(convert._DTYPES) == set(DTYPES) and tuple(FORMATS) == convert._FORMATS
    assert tuple(format.name for format in array_formats()) == convert._ARRAY_FORMATS
    assert tuple(PRESETS) == plan._PRESETS and tuple(IMPLEMENTATIONS) == plan._IMPLEMENTATIONS
    assert analyze._FORMS == FORMS and tuple(THEMES) == analyze._THEMES
    assert (dha._SCORES, dha._ALLOCATIONS, dha._TRAINED) == (SCORES, ALLOCATIONS, TRAINED)
    assert set(plan._OPTIMIZERS) == set(OPTIMIZERS) and set(plan._GPUS) == set(GPUS)


def test_serve_reads_the_librarys_options():
    """The stand-ins for the library while its options are read leave the same options, and the library as it is."""
    typer = pytest.importorskip("typer")
    import transformers
    from transformers.cli.serve import Serve

    from dcformer_commands.serve import _declaration

    def options(declared):
        app = typer.Typer()
        app.command()(declared)
        return [(p.name, p.opts, p.default, p.help) for p in typer.main.get_command(app).params]

    assert options(_declaration()) == options(Serve)
    assert sys.modules["transformers"] is transformers and sys.modules["transformers.cli.serve"].Serve is Serve


@pytest.mark.parametrize(
    "text",
    [
        "from transformers.another import Serve",
        "from transformers.utils import Other\ndef f(x: Other | None): ...",
        "x = 1 / 0",
        "class",
        "class Server: ...",
        None,
    ],
)
def test_another_layout_of_the_library_is_left_to_the_server(text, tmp_path, monkeypatch):
    from dcformer_commands import serve

    (tmp_path / "cli").mkdir()
    if text is not None:
        (tmp_path / "cli" / "serve.py").write_text(text)
    library = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(serve, "find_spec", lambda name: library)
    before = dict(sys.modules)
    assert serve._declaration() is None
    assert sys.modules == before


def test_the_package_needs_nothing_of_testing():
    """Nothing of a test library, and none of its stand-ins that agree to everything."""
    for path in (REPOSITORY / "src").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (unittest|pytest)\b", path.read_text("utf-8"), re.MULTILINE), path


@pytest.mark.parametrize("name", ["analyze", "convert", "dha", "eval", "plan", "selfcheck", "serve"])
def test_commands_run_as_modules(name):
    """As `accelerate launch -m` starts them. Without a last line such a module does nothing, and exits with 0."""
    if name in needed:
        pytest.importorskip(needed[name])
    command = [sys.executable, "-m", f"dcformer_commands.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage" in done.stdout.lower()


def test_console_scripts():
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'^(dcformer-\w+) = "(.*):(.*)"$', text, re.MULTILINE)
    assert {name for name, *_ in found} == {
        f"dcformer-{name}" for name in ("analyze", "convert", "dha", "eval", "plan", "selfcheck", "serve")
    }
    for name, module, function in found:
        assert module == f"dcformer_commands.{name.removeprefix('dcformer-')}"
        assert callable(getattr(importlib.import_module(module), function))
