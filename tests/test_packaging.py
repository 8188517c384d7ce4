"""What is imported is declared, and what is distributed is whole: dependencies, extras, sdist, wheel."""

import ast
import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers import REPOSITORY

SOURCE = REPOSITORY / "src"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"lm_eval": "lm-eval", "orbax": "orbax-checkpoint", "PIL": "pillow", "yaml": "pyyaml"}
# Modules that need an extra as a whole. Elsewhere only functions may import what is not in the base.
NEEDS = {
    "dcformer.training": "train",
    "dcformer.kernels.decode": "kernels",
    "dcformer.kernels.generator": "kernels",
    "dcformer.kernels.generator_backward": "kernels",
    "dcformer.evaluation.sharing": "eval",
    "dcformer.kernels.launch": "kernels",
    "dcformer.kernels.ops": "kernels",
    "dcformer.kernels.passes": "kernels",
    "dcformer.kernels.prepare": "kernels",
    "dcformer.kernels.problem": "kernels",
    "dcformer.kernels.step": "kernels",
    "dcformer.kernels.search": "kernels",
    "dcformer.kernels.triton": "kernels",
    "dcformer.kernels.tuning": "kernels",
}
# Adapters for other people's tools, which load them; functions there import the tool, and no extra brings it.
TOOLS = {"dcformer.analysis.transformer_lens": {"transformer_lens"}}
# Extras that functions elsewhere ask for.
USES = {
    "dcformer.analysis": "analysis",
    "dcformer.analysis.cli": "vision",
    "dcformer.conversion": "jax",
    "dcformer.formats": "jax",
    "dcformer.dha": "train",
    "dcformer.evaluation": "eval",
    "dcformer.kernels": "kernels",
    "dcformer.scaling": "analysis",
    "dcformer.serving": "serve",
    "dcformer.synthetic": "synthetic",
    "dcformer.vision": "vision",
    "dcformer_commands.eval": "eval",
    "dcformer_commands.serve": "serve",
}


def named(requirements) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


BASE = named(PROJECT["dependencies"])
EXTRAS = {name: named(needed) for name, needed in PROJECT["optional-dependencies"].items()}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def extra_of(module: str, table: dict[str, str]) -> set[str]:
    """The distributions that the module's extra brings."""
    return {d for name, extra in table.items() if f"{module}.".startswith(f"{name}.") for d in EXTRAS[extra]}


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, by its whole name, and whether at import time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_of(path) if path.stem == "__init__" else module_of(path).rpartition(".")[0]
    late = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(name, node not in late)]
            if node.module is None:  # from . import module
                found += [(f"{name}.{alias.name}", node not in late) for alias in node.names]
    return found


FILES = sorted(SOURCE.glob("dcformer*/**/*.py"))
OURS = {module_of(path) for path in FILES}


def is_foreign(name: str) -> bool:
    return name.partition(".")[0] not in sys.stdlib_module_names | {"dcformer", "dcformer_commands"}


def distribution(name: str) -> str:
    top = name.partition(".")[0]
    return DISTRIBUTIONS.get(top, top)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_what_is_imported_is_declared(path):
    module = module_of(path)
    there = BASE | extra_of(module, NEEDS)
    for name, at_once in imports(path):
        if is_foreign(name):
            allowed = there if at_once else there | extra_of(module, USES) | TOOLS.get(module, set())
            assert distribution(name) in allowed, f"{module} imports {name}: declare it in pyproject.toml"
        elif at_once and name in OURS:
            assert extra_of(name, NEEDS) <= there, f"{module} imports {name}, which needs more than its extra brings"


def test_base_dependencies_are_imported():
    """By modules that need no extra: what none of them imports belongs to an extra."""
    used = {
        distribution(name) for path in FILES if not extra_of(module_of(path), NEEDS)
        for name, at_once in imports(path) if at_once and is_foreign(name)
    }  # fmt: skip
    assert used == BASE


def test_development_has_every_extra_but_two():
    (inner,) = (r for r in PROJECT["optional-dependencies"]["dev"] if r.startswith("dcformer["))
    assert set(inner[len("dcformer[") : -1].split(",")) == set(EXTRAS) - {"deepspeed", "dev", "quantize"}


def test_constraints_pin_direct_dependencies():
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    pinned = {name.lower().replace("_", "-") for name in re.findall(r"^([\w-]+)==", text, re.MULTILINE)}
    declared = set().union(BASE, *EXTRAS.values()) - {"dcformer"}
    assert not {name.lower().replace("_", "-") for name in declared} - pinned


# --- distributions ----------------------------------------------------------------------------------------------------


def build(kind: str, source: Path, output: Path) -> Path:
    """Builds an sdist or a wheel as pip does, but for the isolation, which needs a package index."""
    code = f"import setuptools.build_meta as b, sys; print(b.build_{kind}(sys.argv[1]))"
    output.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code, str(output)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The names in the sdist, those in the wheel that is built from it, and the wheel's metadata and scripts."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    work = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, work / "source", ignore=ignored)
    with tarfile.open(build("sdist", work / "source", work / "sdist")) as archive:
        files = {name.partition("/")[2] for member in archive if (name := member.name) and member.isfile()}
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(work / "unpacked")
    (unpacked,) = (work / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, work / "wheel")) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (scripts,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        return files, names, wheel.read(metadata).decode(), wheel.read(scripts).decode()


@pytest.mark.long
def test_sdist_is_the_repository(distributions):
    """Whole: its tests need the documentation, the examples and the checkpoint, which is small."""
    there, *_ = distributions
    if not (REPOSITORY / ".git").exists():
        pytest.skip("no git repository, whose files could be compared")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.splitlines() if (REPOSITORY / name).exists()}
    assert not tracked - there
    made = {name for name in there - tracked if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    untracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert not there - tracked - made - set(untracked)


@pytest.mark.long
def test_wheel_is_the_package(distributions):
    _, names, metadata, scripts = distributions
    expected = {path.relative_to(SOURCE).as_posix() for path in FILES}
    expected |= {path.relative_to(SOURCE).as_posix() for path in (SOURCE / "dcformer").rglob("*.yaml")}
    expected |= {"dcformer/py.typed", "dcformer/publish/card.md", "dcformer/analysis/head_view.html"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert scripts.count("dcformer_commands.") == 7
    fields = email.message_from_string(metadata)
    assert set(fields.get_all("Provides-Extra")) == set(EXTRAS)
    urls = dict(url.split(", ") for url in fields.get_all("Project-URL"))
    assert urls == {
        "Paper": "https://arxiv.org/abs/2405.08553",
        "Paper's code": "https://github.com/Caiyun-AI/DCFormer",
    }


@pytest.mark.long
def test_readme_of_the_index_has_no_dead_links(distributions):
    *_, metadata, _ = distributions
    fields = email.message_from_string(metadata)
    assert fields["Description-Content-Type"].startswith("text/markdown")
    targets = re.findall(r"\]\(([^)]+)\)", fields.get_payload())
    assert len(targets) >= 2 and all(target.startswith("https://") for target in targets)
    assert "configuration (`docs/configuration.md`)" in fields.get_payload()
    assert "curves.svg" not in fields.get_payload()
