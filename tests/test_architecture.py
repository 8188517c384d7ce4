"""Imports point one way: every module is in a layer, imports from its own room and from lower layers, and in no circle.

CONTRIBUTING.md shows the same layers. Imports inside functions count: waiting with an import does not turn it.
"""

import ast
import graphlib
import importlib
from pathlib import Path

import pytest
from helpers import REPOSITORY

import dcformer

SOURCE = REPOSITORY / "src"
# Lowest first. A room is a package or a module; rooms of the same layer do not import each other.
LAYERS = (
    {"errors", "files"},
    {"model"},  # all flat *_dcformer.py files, which remote-code export ships
    {"kernels"},
    {"loading", "shards"},
    {"analysis", "optimization", "vision"},
    {"head_systems"},
    {"modules", "remote_code"},
    {"dcformer"},  # the package's __init__: public names and registration
    {"cache_report", "export", "formats", "recipes", "scaling", "selfcheck", "synthetic"},
    {"conversion"},
    {"evaluation", "planning", "publish", "serving", "training"},
    {"dha"},
)
# The flat files, in the same way: each imports those of earlier lines.
MODEL_LAYERS = (
    {"heads_dcformer", "implementations_dcformer"},
    {
        "fusion_dcformer",
        "peft_dcformer",
        "legacy_dcformer",
        "presets_dcformer",
        "parallel_dcformer",
        "stored_dcformer",
        "compose_dcformer",
    },
    {"configuration_dcformer", "masks_dcformer", "tokens_dcformer"},
    {"attention_dcformer"},
    {"plain_dcformer"},
    {"chunked_dcformer"},
    {"cache_dcformer", "layouts_dcformer"},
    {"arguments_dcformer", "generation_dcformer", "hub_dcformer"},
    {"modeling_dcformer"},
)
LAYER = {name: number for number, rooms in enumerate(LAYERS) for name in rooms}


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module of the package, by its whole name."""
    files = (source / "dcformer").rglob("*.py")
    return {".".join(f.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported(name: str, path: Path, known: dict[str, Path]) -> dict[str, bool]:
    """The modules of the package that a module imports, and whether at import time, from its text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    late = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }  # fmt: skip
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from . import module` imports the module; any other name comes from the package itself
            names = [whole if (whole := f"{base}.{alias.name}") in known else base for alias in node.names]
        else:
            continue
        for other in names:
            if other.partition(".")[0] == "dcformer":
                found[other] = found.get(other, False) or node not in late
    return found


def room(module: str) -> str:
    """The room that a module is in."""
    first = ([*module.split("."), ""])[1]
    return "model" if first.endswith("_dcformer") else first or "dcformer"


def level(module: str) -> int:
    """The layer of a module, from 0."""
    name, layers = room(module), LAYERS
    if name == "model":
        name, layers = module.rpartition(".")[2], MODEL_LAYERS
    levels = [number for number, rooms in enumerate(layers) if name in rooms]
    assert levels, f"{module}: {name!r} is in no layer; give it a place in the table above and in docs/architecture.md"
    return levels[0]


def arrows_up(source: Path = SOURCE) -> list[str]:
    """Every import that does not run from a higher layer to a lower one, or stay in its room."""
    known = modules(source)
    wrong = []
    for name, path in known.items():
        for other in imported(name, path, known):
            assert other in known, f"{name} imports {other}, which does not exist"
            if room(name) == room(other):
                up = room(name) == "model" and level(other) >= level(name)
            else:
                up = LAYER[room(other)] >= LAYER[room(name)]
            wrong += [f"{name} -> {other}"] if up else []
    return wrong


def circle(source: Path = SOURCE) -> list[str]:
    """Modules that import each other at import time; empty when there are none."""
    known = modules(source)
    graph = {
        name: {other for other, early in imported(name, path, known).items() if early} for name, path in known.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_module_is_in_a_layer():
    for name in modules():
        level(name)


def test_imports_run_down():
    assert not arrows_up()


def test_no_circle():
    assert not circle()


def test_flat_files_import_names_of_flat_files():
    """Remote-code export finds files by `from .x_dcformer import y`, and ships nothing else of the package."""
    flat = {name: path for name, path in modules().items() if room(name) == "model"}
    assert len(flat) > 8
    for name, path in flat.items():
        assert {room(other) for other in imported(name, path, modules())} <= {"model"}, name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("dcformer") for alias in node.names), ast.unparse(node)
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and (node.module or "").endswith("_dcformer"), f"{name}: {ast.unparse(node)}"


def test_commands_import_the_package_late():
    """`--help` is answered without PyTorch."""
    for path in (SOURCE / "dcformer_commands").glob("*.py"):
        early = [name for name, now in imported(f"dcformer_commands.{path.stem}", path, {}).items() if now]
        assert not early, path


# --- the checks find what they look for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "text", "arrow"),
    [
        ("kernels/ops.py", "from ..conversion import convert", "dcformer.kernels.ops -> dcformer.conversion"),
        ("formats/pax.py", "def f():\n    from ..conversion.sources import x", "formats.pax -> dcformer.conversion"),
        ("compose_dcformer.py", "from .modeling_dcformer import x", "compose_dcformer -> dcformer.modeling_dcformer"),
        ("compose_dcformer.py", "from .configuration_dcformer import x", "compose_dcformer -> dcformer.configuration"),
        ("configuration_dcformer.py", "from .compose_dcformer import x", ""),
        ("configuration_dcformer.py", "from .masks_dcformer import x", "configuration_dcformer -> dcformer.masks"),
        ("masks_dcformer.py", "from .compose_dcformer import x", ""),
        ("training/run.py", "from .. import planning", "dcformer.training.run -> dcformer.planning"),
        ("training/run.py", "import dcformer", ""),
        ("compose_dcformer.py", "import dcformer", "dcformer.compose_dcformer -> dcformer"),
        ("conversion/sources.py", "from ..formats.pax import x\nfrom . import convert", ""),
    ],
)
def test_an_arrow_that_runs_up_is_found(module, text, arrow, tmp_path):
    files = ["kernels/ops.py", "formats/pax.py", "conversion/__init__.py", "conversion/sources.py", "errors.py"]
    files += [
        "__init__.py",
        "masks_dcformer.py",
        "configuration_dcformer.py",
        "conversion/convert.py",
        "planning.py",
        "training/run.py",
        "compose_dcformer.py",
        "modeling_dcformer.py",
    ]
    for file in files:
        path = tmp_path / "dcformer" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if file == module else "")
    found = arrows_up(tmp_path)
    assert len(found) == bool(arrow) and all(arrow in line for line in found)


def test_a_circle_is_found(tmp_path):
    (tmp_path / "dcformer" / "kernels").mkdir(parents=True)
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / "dcformer" / "kernels" / f"{one}.py").write_text(f"from .{other} import x\n")
    assert {name.rpartition(".")[2] for name in circle(tmp_path)} == {"a", "b", "c"}
    (tmp_path / "dcformer" / "kernels" / "c.py").write_text("def f():\n    from .a import x\n")
    assert not circle(tmp_path)


def test_other_parts_are_there_by_name():
    for name in ("dha", "recipes", "scaling"):
        assert dcformer.__getattr__(name) is importlib.import_module(f"dcformer.{name}") is getattr(dcformer, name)
    for name in ("_dha", "Recipes", "recipies", "a.b", "dha.cli", ""):
        with pytest.raises(AttributeError, match=f"module 'dcformer' has no attribute '{name}'"):
            getattr(dcformer, name)
