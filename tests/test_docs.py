"""Every Python block of the README and of docs/ runs, in order, in one namespace per file; links lead somewhere."""

import ast
import re
import tomllib
from unittest import mock

import pytest
from helpers import REPOSITORY

import dcformer
from dcformer.head_systems import HEAD_SYSTEMS

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANCHOR = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    for place in REPOSITORY.iterdir():
        if place.name != "runs":  # which pages write to
            (tmp_path / place.name).symlink_to(place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    if not blocks:
        pytest.skip(f"{page.name} has no Python block")
    namespace = {"__name__": "__snippet__"}
    with mock.patch.dict(HEAD_SYSTEMS):  # a page adds one
        for block in blocks:
            line = text[: block.start()].count("\n") + 1
            code = compile("\n" * line + block[1], str(page), "exec")
            exec(code, namespace)


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def headings(page):
    """The anchors of a page, made of its headings as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    for target, anchor in ANCHOR.findall(page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert anchor in headings(linked), f"{page.name} links to {target}#{anchor}, which is not a heading there"


def test_readme_names_the_make_targets():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test", "hf-contract"):
        assert f"make {command}" in readme
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    for command in re.findall(r"^make ([\w-]+)", ci, re.MULTILINE):
        assert f"| `make {command}` |" in contributing, f".ci/run calls make {command}: CONTRIBUTING.md does not say so"


def test_index_lists_the_public_names():
    """A row for each module with an `__all__`, and in it exactly these names; every page is linked."""
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    documented = {
        module: re.findall(r"`(\w+)`", names)
        for module, names in re.findall(r"^\| \[?`(dcformer[.\w]*)`.*? \| (.*) \|$", index, re.M)
    }
    source = REPOSITORY / "src" / "dcformer"
    rooms = [*source.glob("*/__init__.py"), *(f for f in source.glob("*.py") if not f.stem.endswith("_dcformer"))]
    public = {}
    for file in rooms:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                parts = file.relative_to(source.parent).with_suffix("").parts
                public[".".join(part for part in parts if part != "__init__")] = ast.literal_eval(node.value)
    assert documented == public
    linked = set(LINK.findall(index))
    assert {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"index.md"} <= linked


def test_readme_begins_with_what_a_reader_decides_by():
    """A sentence, a picture, how to install it, code and a table of five rows, on one page."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 60
    python = readme.index("```python")
    assert readme.index("![") < readme.index("pip install") < python < readme.index("\n|")
    assert len(BLOCK.search(readme)[1].splitlines()) <= 7
    assert len(re.findall(r"^\| [A-Z]", readme, re.MULTILINE)) == 5


def test_docstrings_name_the_model():
    """The library's decorator does not know models of other packages, and would begin with "The None Model"."""
    found = {name: getattr(dcformer, name).__doc__ or "" for name in dcformer.__all__}
    assert not [name for name, text in found.items() if "None Model" in text]
    assert found["DCFormerForCausalLM"].split()[0] == "DCFormer"


def test_counts_of_the_ablation_are_those_of_its_tables():
    tables = (REPOSITORY / "docs" / "study" / "tables.md").read_text(encoding="utf-8")
    counts = re.search(r"Of 48 comparisons: (\d+) agrees, (\d+) disagrees, (\d+) open", tables)
    agree, disagree, still_open = counts.groups()
    for page in ("index.md", "reproduction.md"):
        text = " ".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8").split())
        assert re.search(rf"\b{agree} agree\b.*?\b{disagree} disagree\b,? and {still_open} are open", text), page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_lowest_versions_are_those_of_pyproject(page):
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    python = settings["project"]["requires-python"].removeprefix(">=")
    bounds = dict(re.findall(r"^([\w.-]+)>=([\d.]+)", "\n".join(settings["project"]["dependencies"]), re.MULTILINE))
    text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
    found = re.search(r"Python ([\d.]+\d), torch ([\d.]+\d),? (?:and )?Transformers ([\d.]+\d)", text)
    assert found and found.groups() == (python, bounds["torch"], bounds["transformers"])
    assert settings["tool"]["mypy"]["python_version"] == python
    assert settings["tool"]["ruff"]["target-version"] == f"py{python.replace('.', '')}"
    assert f"Python {python} or later" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
