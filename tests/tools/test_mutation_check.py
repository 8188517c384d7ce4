"""The list of mutations keeps up with source and tests; the check tells killed, survived and invalid ones apart."""

import ast
import importlib
import json

import pytest
from helpers import REPOSITORY


@pytest.fixture(scope="module")
def tool():
    """tools/mutation_check.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "tools"))
        yield importlib.import_module("mutation_check")


def test_every_mutation_applies_to_the_source(tool):
    for mutation in tool.MUTATIONS:
        changed = tool.apply(mutation, (REPOSITORY / tool.SOURCE / mutation.file).read_text(encoding="utf-8"))
        ast.parse(changed)
    names = [mutation.name for mutation in tool.MUTATIONS]
    assert len(names) == len(set(names))


def test_the_tests_of_every_mutation_exist(tool):
    functions = {}
    for test in {test for mutation in tool.MUTATIONS for test in mutation.tests}:
        file, _, name = test.partition("::")
        if file not in functions:
            tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
            functions[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in functions[file], test


# --- a small repository -----------------------------------------------------------------------------------------------

SOURCE = "def double(x):\n    return 2 * x\n\n\ndef unused():\n    return 1\n"
TESTS = """
import pytest
from dcformer.numbers import double

def test_double():
    assert double(3) == 6

def test_zero():
    assert double(0) == 0

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass
"""


@pytest.fixture
def small(tool, tmp_path):
    """A repository with one module; a function that runs the check there on one change, and returns its result."""
    root = tmp_path / "repository"
    (root / "src" / "dcformer").mkdir(parents=True)
    (root / "src" / "dcformer" / "__init__.py").touch()
    (root / "src" / "dcformer" / "numbers.py").write_text(SOURCE)
    (root / "tests").mkdir()
    (root / "tests" / "test_numbers.py").write_text(TESTS)
    (root / "pyproject.toml").touch()

    def check(old, new, test="test_double", options=()):
        mutation = tool.Mutation("area", "name", "numbers.py", old, new, (f"tests/test_numbers.py::{test}",))
        code = tool.main(list(options), root, [mutation])
        results = root / "runs" / "mutation_check.json"
        return code, json.loads(results.read_text())["name"] if results.is_file() else None

    check.root = root
    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "test", "code", "verdict", "by"),
    [
        ("2 * x", "3 * x", "test_double", 0, "killed", "tests/test_numbers.py::test_double"),
        ("2 * x", "__import__('os').abort()", "test_double", 0, "killed", "signal 6"),
        ("2 * x", "x + 3", "test_double", 1, "survived", ""),
        ("2 * x", "3 * x", "test_zero", 1, "survived", ""),
        ("2 * x", "2 *", "test_double", 1, "invalid", "invalid syntax"),
        ("def double", "import nothing_of_this_name\ndef double", "test_double", 1, "invalid", "nothing_of_this_name"),
    ],
)
def test_verdicts(small, tool, monkeypatch, capsys, old, new, test, code, verdict, by):
    if verdict != "killed":  # once with all that it does
        monkeypatch.setattr(tool, "check_unchanged", lambda *_: None)
    found, result = small(old, new, test)
    assert (found, result["verdict"]) == (code, verdict) and by in result["by"]
    assert (small.root / "src" / "dcformer" / "numbers.py").read_text() == SOURCE
    share = "1  100.0%" if verdict == "killed" else "0    0.0%"
    assert f"all                    1       {share}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "test", "message"),
    [
        ("3 * x", "2 * x", "test_double", "name: its old text is 0 times in numbers.py, expected once"),
        ("return", "yield", "test_double", "name: its old text is 2 times in numbers.py"),
        ("2 * x", "2 * x", "test_double", "name changes nothing"),
        ("2 * x", "3 * x", "test_gone", "The tests must pass without a change"),
        ("2 * x", "3 * x", "test_skipped", "The tests must pass without a change"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(small, capsys, old, new, test, message):
    assert small(old, new, test) == (2, None)
    assert message in capsys.readouterr().err


def test_results_are_kept_until_something_changes(small, tool, monkeypatch):
    calls = []
    monkeypatch.setattr(tool, "check_unchanged", lambda *_: None)
    monkeypatch.setattr(tool, "judge", lambda *_: calls.append(1) or {"verdict": "killed", "by": "a test"})
    assert [small("2 * x", "3 * x")[0] for _ in range(2)] == [0, 0] and len(calls) == 1
    small("2 * x", "3 * x", options=["--again"])
    assert len(calls) == 2
    tests = small.root / "tests" / "test_numbers.py"
    tests.write_text(TESTS.replace("double(0) == 0", "double(0) == 1") + "# and a comment\n")
    small("2 * x", "3 * x")
    assert len(calls) == 2  # another test
    tests.write_text(TESTS.replace("double(3) == 6", "double(4) == 8"))
    small("2 * x", "3 * x")
    assert len(calls) == 3
    (small.root / "src" / "dcformer" / "numbers.py").write_text(SOURCE + "\n")
    small("2 * x", "3 * x")
    assert len(calls) == 4
    small("2 * x", "4 * x")
    assert len(calls) == 5
    assert small("2 * x", "4 * x", options=["--only", "other"])[0] == 2 and len(calls) == 5


def test_the_list_is_printed(tool, capsys):
    assert tool.main(["--list", "--only", "^cache the oldest token"]) == 0
    assert capsys.readouterr().out == "cache          the oldest token one too far  (cache_dcformer.py)\n"
