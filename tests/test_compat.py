"""docs/compat.md is true: its rows point at something, and no private name of another library is missing in it."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import REPOSITORY

import dcformer

SOURCE = REPOSITORY / "src"
TEXT = (REPOSITORY / "docs" / "compat.md").read_text(encoding="utf-8")
OWN = {"dcformer", "dcformer_commands"}


@dataclass(frozen=True)
class Row:
    where: Path
    what: str
    why: str
    since: str
    tests: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            where, what, why, since, tests = (cell.strip() for cell in line.strip("|").split("|"))
            near, far = SOURCE / "dcformer" / where.strip("`"), REPOSITORY / where.strip("`")
            found.append(Row(near if near.exists() else far, what, why, since, tuple(re.findall("`([^`]+)`", tests))))
    return found


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.where.name} {row.what[:40]}")
def test_row(row):
    """Its file is there and has the first of the names; its tests are there."""
    assert row.why and re.fullmatch(r"([a-z-]+ )?\d+\.\d+(\.\d+)?", row.since)
    name = re.search(r"`([^`]+)`", row.what)[1]
    last = re.findall(r"\w+", name.partition("(")[0])[-1]
    assert last in row.where.read_text(encoding="utf-8"), f"{row.where} has no {last}"
    assert row.tests
    for test in row.tests:
        if test.startswith("make "):
            assert re.search(rf"^{test.removeprefix('make ')}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
            continue
        file, _, function = test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert not function or re.search(rf"^ *def {function}\(", text, re.MULTILINE), f"{file} has no {function}"


def private_names(path: Path) -> set[str]:
    """Names with one leading underscore that a file takes from modules of other libraries."""
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
    return {name for name in found if re.match(r"_(?!_)", name)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_of_other_libraries_are_in_the_table(path):
    listed = " ".join(row.what for row in ROWS if row.where == path)
    missing = {name for name in private_names(path) if not re.search(rf"\b{name}\b", listed)} - {"_"}
    assert not missing, f"{path.name} uses {sorted(missing)}: find a public way, or give docs/compat.md a row"


def test_the_search_finds_private_names(tmp_path):
    (tmp_path / "x.py").write_text(
        "import torch\nimport a._b as c\nfrom transformers.x import _y, z\nfrom .own import _mine\n"
        "torch._C._f()\nz.q._r\nself._own\n_mine._s\n"
    )
    assert private_names(tmp_path / "x.py") == {"_C", "_f", "_b", "_y", "_r"}


def overridden() -> set[tuple[Path, str]]:
    """(file, name) of what our classes define under a private name that a base in another library has, too."""
    found = set()
    for name in dcformer.__all__:
        if isinstance(cls := getattr(dcformer, name), type):
            for base in cls.__mro__:
                if base.__module__.partition(".")[0] in OWN:
                    others = [b for b in base.__mro__ if b.__module__.partition(".")[0] not in {*OWN, "builtins"}]
                    theirs = {name for other in others for name in vars(other)}
                    path = SOURCE / (base.__module__.replace(".", "/") + ".py")
                    found |= {(path, own) for own in vars(base) if re.match(r"_(?!_)", own) and own in theirs}
    return {(path, name) for path, name in found if name not in {"_abc_impl", "_auto_class"}}


def test_private_methods_that_we_override_are_in_the_table():
    found = overridden()
    assert any(name == "_init_weights" for _, name in found)
    for path, name in found:
        assert any(re.search(rf"\b{name}\b", row.what) for row in ROWS if row.where == path), f"{path.name}: {name}"
