"""docs/compat.md is true: its rows point at something, and no private name or overridden method is missing in it."""

import ast
import importlib
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import REPOSITORY

import dcformer

SOURCE = REPOSITORY / "src"
TEXT = (REPOSITORY / "docs" / "compat.md").read_text(encoding="utf-8")
OWN = {"dcformer", "dcformer_commands"}


@dataclass(frozen=True)
class Row:
    where: tuple[Path, ...]
    what: str
    why: str
    since: str
    tests: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            where, what, why, since, tests = (cell.strip() for cell in line.strip("|").split("|"))
            files = [(SOURCE / "dcformer" / name, REPOSITORY / name) for name in re.findall("`([^`]+)`", where)]
            paths = tuple(near if near.exists() else far for near, far in files)
            found.append(Row(paths, what, why, since, tuple(re.findall("`([^`]+)`", tests))))
    return found


ROWS = rows()


def is_listed(path: Path, name: str) -> bool:
    """Whether a row of a file has a name."""
    return any(re.search(rf"\b{name}\b", row.what) for row in ROWS if path in row.where)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.where[0].name} {row.what[:40]}")
def test_row(row):
    """Its files are there and have the first of the names; its tests are there."""
    assert row.why and re.fullmatch(r"([a-z-]+ )?\d+\.\d+(\.\d+)?", row.since)
    name = re.search(r"`([^`]+)`", row.what)[1]
    last = re.findall(r"\w+", name.partition("(")[0])[-1]
    for path in row.where:
        assert last in path.read_text(encoding="utf-8"), f"{path} has no {last}"
    assert row.tests
    for test in row.tests:
        if test.startswith("make "):
            assert re.search(rf"^{test.removeprefix('make ')}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
            continue
        file, _, function = test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert not function or re.search(rf"^ *def {function}\(", text, re.MULTILINE), f"{file} has no {function}"


@cache
def own_names(source: Path = SOURCE) -> set[str]:
    """Names that the package defines: functions, classes, variables, and attributes of `self` or `cls`."""
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def private_names(path: Path, source: Path = SOURCE) -> set[str]:
    """Names with one leading underscore that a file takes from other libraries.

    They are parts of their modules, or attributes of any object that no module of ours defines.
    """
    tree, foreign, found = ast.parse(path.read_text(encoding="utf-8")), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in OWN:
                    foreign.add((alias.asname or alias.name).partition(".")[0])
                    found |= set(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] not in OWN:
            foreign |= {alias.asname or alias.name for alias in node.names}
            found |= {alias.name for alias in node.names} | set(node.module.split("."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names, inner = [], node
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in foreign:
                found |= set(names)
            found |= {node.attr} - own_names(source)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = getattr(node.args[1], "value", None)
            found |= {name} - own_names(source) if isinstance(name, str) else set()
    return {name for name in found if re.match(r"_(?!_)", name)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_of_other_libraries_are_in_the_table(path):
    missing = {name for name in private_names(path) if not is_listed(path, name)} - {"_"}
    assert not missing, f"{path.name} uses {sorted(missing)}: find a public way, or give docs/compat.md a row"


def test_the_search_finds_private_names(tmp_path):
    (tmp_path / "x.py").write_text(
        "import torch\nimport a._b as c\nfrom transformers.x import _y, z\nfrom .own import _mine\n"
        "torch._C._f()\nz.q._r\nself._own = 1\n_mine._own\n"
        "config._theirs\nconfig._set = 1\nself._inherited\ngetattr(config, '_named', None)\n"
    )
    theirs = {"_C", "_f", "_b", "_y", "_r", "_theirs", "_set", "_inherited", "_named"}
    assert private_names(tmp_path / "x.py", tmp_path) == theirs


# What the other library asks its users to define.
MADE_TO_BE_OVERRIDDEN = {"__init__", "__getstate__", "forward", "backward", "extra_repr"}
DO_NOTHING = {"TrainerCallback"}  # classes whose methods are hooks


def class_bodies(path: Path) -> dict[str, set[str]]:
    """For every class of a file, what its body defines: all functions, and other names with one leading underscore."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            names = found.setdefault(node.name, set())
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    names.add(part.name)
                for target in getattr(part, "targets", [getattr(part, "target", None)]):
                    if isinstance(target, ast.Name) and (target.id[0] == "_" or is_method(part.value)):
                        names.add(target.id)
    return found


def is_method(value: ast.expr | None) -> bool:
    """Whether a value in the body of a class is another class's method, or a property."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) == "property"
    return isinstance(value, ast.Attribute) and ast.unparse(value)[0].isupper()


def overridden() -> set[tuple[Path, str]]:
    """(file, name) of what classes of any of our modules define and a base of theirs in another library has, too."""
    found = set()
    for info in pkgutil.walk_packages(dcformer.__path__, "dcformer."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # needs an extra
            continue
        path = Path(module.__file__)
        bodies = class_bodies(path)
        for cls in vars(module).values():
            if not isinstance(cls, type) or cls.__module__ != info.name:
                continue
            others = [b for b in cls.__mro__ if b.__module__.partition(".")[0] not in {*OWN, "builtins"}]
            theirs = {name for other in others if other.__name__ not in DO_NOTHING for name in vars(other)}
            found |= {(path, name) for name in bodies.get(cls.__name__, set()) & theirs - MADE_TO_BE_OVERRIDDEN}
    return found


def test_what_we_override_is_in_the_table():
    found = overridden()
    expected = {"_init_weights", "from_pretrained", "get_correct_attn_implementation", "base_model_tp_plan"}
    expected |= {"create_optimizer", "on_train_begin"} if find_spec("trl") else set()
    assert expected <= {name for _, name in found}
    missing = sorted(f"{path.relative_to(SOURCE)}: {name}" for path, name in found if not is_listed(path, name))
    assert not missing, missing
