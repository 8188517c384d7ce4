"""The runner of Transformers' own tests: what counts as expected, and that it fetches what its hash names alone."""

import atexit
import importlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import REPOSITORY
from torch.multiprocessing.spawn import ProcessRaisedException

FOLDER = REPOSITORY / "tools" / "hf_contract"
FOUND = {
    "DCFormerTest::test_a": None,
    "DCPythiaTest::test_a": None,
    "DCFormerTest::test_b": ("skipped", "Skipped: no GPU"),
    "DCPythiaTest::test_b": ("skipped", "Skipped: no GPU"),
    "DCFormerTest::test_c": None,
    "DCFormerTest::test_c[Model]": ("failed", "E  AssertionError: other names"),
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("hf_contract_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def expected(tool):
    return {
        "skipped": [tool.Group("no device", "no GPU", ["test_b"])],
        "failed": [tool.Group("by decision", "other names", ["DCFormerTest::test_c[Model]"])],
    }


def test_all_as_expected(tool, expected):
    assert tool.surprises(FOUND, expected) == {}
    assert tool.unknown(FOUND, expected) == []


@pytest.mark.parametrize(
    ("name", "outcome", "sentence"),
    [
        ("DCFormerTest::test_a", ("failed", "E  ValueError"), "failed, and expected.toml does not say so"),
        ("DCFormerTest::test_a", ("skipped", "no GPU"), "skipped, and expected.toml does not say so"),
        ("DCFormerTest::test_c[Base]", ("failed", "E  other names"), "failed, and expected.toml does not say so"),
        ("DCPythiaTest::test_b", None, "did not end as 'skipped'"),
        ("DCPythiaTest::test_b", ("failed", "E  ValueError: no GPU"), "failed, and expected.toml does not say so"),
        ("DCPythiaTest::test_b", ("skipped", "too slow"), "skipped for another reason than 'no GPU'"),
        ("DCFormerTest::test_c[Model]", None, "did not end as 'failed'"),
        ("DCFormerTest::test_c[Model]", ("failed", "E  TypeError"), "failed for another reason than 'other names'"),
    ],
)
def test_surprises(tool, expected, name, outcome, sentence):
    wrong = tool.surprises(FOUND | {name: outcome}, expected)
    assert list(wrong) == [name] and sentence in wrong[name]


def test_a_subtest_that_did_not_come(tool, expected):
    found = {name: outcome for name, outcome in FOUND.items() if "[" not in name}
    assert list(tool.surprises(found, expected)) == ["DCFormerTest::test_c[Model]"]


def test_all_subtests(tool, expected):
    expected["failed"] = [tool.Group("by decision", "other names", ["test_c[*]"])]
    assert tool.surprises(FOUND, expected) == {}
    assert tool.unknown(FOUND, expected) == []
    other = "DCFormerTest::test_c[Base]"
    assert list(tool.surprises(FOUND | {other: ("failed", "E  TypeError")}, expected)) == [other]
    assert list(tool.surprises(FOUND | {other: None}, expected)) == [other]
    passed = {name: outcome for name, outcome in FOUND.items() if "[" not in name}
    assert list(tool.surprises(passed, expected)) == ["DCFormerTest::test_c[*]"]


def test_what_was_not_selected_counts_for_nothing(tool, expected):
    assert tool.surprises({"DCFormerTest::test_a": None}, expected) == {}
    assert tool.unknown({"DCFormerTest::test_a": None}, expected) == ["test_b", "DCFormerTest::test_c[Model]"]


def test_what_the_machine_decides_may_pass(tool, expected):
    expected["skipped"] = [replace(group, machine=True) for group in expected["skipped"]]
    assert tool.surprises(FOUND | {"DCPythiaTest::test_b": None}, expected) == {}


@pytest.mark.parametrize("version", ["5.23.0", "5.24.0"])
def test_the_list_has_reasons_and_names_each_test_once(tool, version):
    expected = tool.read_expected(FOLDER / "expected.toml", version)
    groups = [group for listed in expected.values() for group in listed]
    assert all(len(group.why) > 10 and group.tests for group in groups)
    assert all(bool(group.says) == (kind != "passed") for kind, listed in expected.items() for group in listed)
    tests = [test for group in groups for test in group.tests]
    assert len(tests) == len(set(tests))


@pytest.mark.parametrize(("key", "is_in"), [("since", [False, True, True]), ("until", [True, False, False])])
def test_tests_that_a_version_does_not_have_are_not_expected(tool, tmp_path, key, is_in):
    path = tmp_path / "expected.toml"
    path.write_text(f'[[skipped]]\nwhy = "new"\nsays = "old"\n{key} = "5.24"\ntests = ["test_a"]\n')
    assert [bool(tool.read_expected(path, v)["skipped"]) for v in ("5.9.1", "5.24.0", "6.0.0")] == is_in


def test_a_version_without_a_hash_is_not_fetched(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "BUILD", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("nothing should be fetched"))
    with pytest.raises(SystemExit, match=r"transformers 5\.0\.0 is installed and .*sdist\.txt has no hash"):
        tool.fetch_tests("5.0.0")
    assert not list(tmp_path.iterdir())


def test_a_wrong_file_is_refused(tool, tmp_path, monkeypatch, capfd):
    """By pip, as its hash is another; the next run begins anew."""
    monkeypatch.setattr(tool, "BUILD", tmp_path / "build")
    (tmp_path / "index").mkdir()
    version = (FOLDER / "sdist.txt").read_text().partition("==")[2].split()[0]
    (tmp_path / "index" / f"transformers-{version}.tar.gz").write_bytes(b"not what was asked for")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for _ in range(2):
        with pytest.raises(SystemExit, match="pip could not fetch it"):
            tool.fetch_tests(version)
        assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (tmp_path / "build" / version).exists()


def test_what_a_failed_test_wrote_is_kept(tool):
    outcomes = tool.Outcomes()
    report = SimpleNamespace(nodeid="f.py::ATest::test_a", passed=False, failed=True, skipped=False, outcome="failed")
    report.longreprtext, report.capstderr = "E  ProcessExitedException", "x" * 5000 + "terminate called"
    outcomes.pytest_runtest_logreport(report)
    assert outcomes.found == {"ATest::test_a": ("failed", "E  ProcessExitedException")}
    assert outcomes.written["ATest::test_a"].endswith("xterminate called")


def aborts_at_its_end(rank, passes):
    atexit.register(os.abort)
    if not passes:
        raise ValueError(f"rank {rank}")


@pytest.mark.parametrize("passes", [True, False])
def test_a_rank_that_passed_may_not_abort_while_python_shuts_down(monkeypatch, passes):
    """As threads of gloo do now and then; one that did not pass fails."""
    monkeypatch.syspath_prepend(str(FOLDER / "stand_ins"))
    start = importlib.import_module("distributed_testing_utils")._start_rank_processes
    if passes:
        start(aborts_at_its_end, (True,), 1)
    else:
        with pytest.raises(ProcessRaisedException, match="ValueError: rank 0"):
            start(aborts_at_its_end, (False,), 1)
