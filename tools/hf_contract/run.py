#!/usr/bin/env python
"""Runs Transformers' own tests of models on all of this package's: ``make hf-contract``, about six minutes.

The wheel of Transformers has no tests; the source distribution of the installed version has them, and is fetched once
with pip (10 MB, its hash is in ``sdist.txt``) into ``build/hf_contract/``. Modules that it lacks are replaced by those
of ``stand_ins/`` and by empty classes. ``expected.toml`` lists every test that skips or fails, with the reason; any
other skip or failure, and a listed one that did not come, is an error.

Arguments are pytest's, e.g. ``-k 'not fsdp' -x``, or ``-n 0`` for one process instead of two.
"""

import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "hf_contract"
# What the tests import and the source distribution does not have.
EMPTY = {
    "__init__.py": "",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}


@dataclass(frozen=True)
class Group:
    """Tests of ``expected.toml`` that skip, or fail, for one reason.

    Args:
        why: the reason, for people.
        says: a part of the message that the test skips or fails with.
        tests: names, for all families or with the class and "::" in front, and with the label of the subtest in
            brackets behind where only a subtest ends so, ``[*]`` for all its subtests.
        machine: the tests run on a machine that has what they need: passing is no surprise.
        since: the version of Transformers that has them first; empty if all supported ones have them.
        until: the version from which on they are gone; empty if no supported one lacks them.
    """

    why: str
    says: str
    tests: list[str]
    machine: bool = False
    since: str = ""
    until: str = ""

    def is_of(self, version: str) -> bool:
        """Whether that version of Transformers has the tests."""
        first, gone = Version(self.since or "0"), Version(self.until or "9999")
        return first <= Version(version) < gone


@dataclass
class Outcomes:
    """A plugin that collects how each test and each subtest ended.

    Attributes:
        found: ("skipped" or "failed", message) by name, "DCFormerTest::test_x" or "DCFormerTest::test_x[subtest]"; None
            for what passed.
        written: the end of what each failed one and its processes wrote to their standard error.
    """

    found: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.partition("::")[2]
        context = getattr(report, "context", None)  # of a subtest
        if context is not None:
            name += f"[{context.msg or ', '.join(map(str, context.kwargs.values()))}]"
        if report.passed:
            self.found.setdefault(name, None)
            return
        self.found[name] = (report.outcome, report.longrepr[2] if report.skipped else report.longreprtext)
        if report.failed:
            self.written[name] = report.capstderr[-4000:]


def read_expected(path: Path, version: str) -> dict[str, list[Group]]:
    """The groups of ``expected.toml`` under "skipped", "failed", and "passed": exceptions of a class to the others.

    Args:
        path: the file.
        version: of Transformers; groups of tests that it does not have are left out.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    groups = {kind: [Group(**group) for group in tables.get(kind, [])] for kind in ("skipped", "failed", "passed")}
    return {kind: [group for group in listed if group.is_of(version)] for kind, listed in groups.items()}


def surprises(found: dict[str, tuple[str, str] | None], expected: dict[str, list[Group]]) -> dict[str, str]:
    """What did not end as expected.

    Args:
        found: as `Outcomes.found`. What is expected of tests that are not in it, because they were not selected, counts
            for nothing.
        expected: as of `read_expected`. A test that is listed without its class is expected of every class that has it.

    Returns:
        A sentence for each name, none if all ended as expected.
    """
    listed: dict[str, tuple[str, Group]] = {}
    for kind, groups in expected.items():
        for group in groups:
            for test in group.tests:
                base, _, label = test.partition("[")
                for name in found:
                    if base in (name, name.partition("::")[2]):
                        subtests = [n for n in found if n.startswith(f"{name}[")] if label == "*]" else []
                        listed |= dict.fromkeys(subtests or [name + test[len(base) :]], (kind, group))
    wrong = {}
    for name in found.keys() | listed.keys():
        kind, message = found.get(name) or ("passed", "")
        wanted, group = listed.get(name, ("passed", None))
        if kind == wanted:
            if group is not None and group.says not in message:
                wrong[name] = f"{kind} for another reason than {group.says!r}:\n{message}"
        elif kind != "passed":
            wrong[name] = f"{kind}, and expected.toml does not say so:\n{message}"
        elif not group.machine:
            wrong[name] = f"did not end as {wanted!r}, as expected.toml says; delete it there"
    return wrong


def unknown(found: dict[str, tuple[str, str] | None], expected: dict[str, list[Group]]) -> list[str]:
    """The names in ``expected.toml`` that no test has; `found` is of a run of all tests."""
    names = found.keys() | {name.partition("::")[2] for name in found}
    listed = [test for groups in expected.values() for group in groups for test in group.tests]
    return [test for test in listed if test.partition("[")[0] not in names]


def fetch_tests(version: str) -> Path:
    """Puts the tests of that version of Transformers into ``build/``, unless they are there.

    Returns:
        The folder that holds the package ``tests``.
    """
    folder = BUILD / version
    if (folder / "tests").is_dir():
        return folder
    requirements = HERE / "sdist.txt"
    if f"transformers=={version} --hash" not in requirements.read_text(encoding="utf-8"):
        sys.exit(
            f"error: transformers {version} is installed and {requirements} has no hash of its source distribution; "
            "install a version that it has (make setup installs one), or add the line"
        )
    work = BUILD / f".{version}.incomplete"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print(f"fetching the source distribution of transformers {version} ...", flush=True)
    # Without isolation, pip needs nothing else from the index to read the distribution's metadata.
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    pip += ["--no-binary=transformers", "--no-build-isolation", "--require-hashes"]
    lines = [line for line in requirements.read_text(encoding="utf-8").splitlines() if f"=={version} " in line]
    (work / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run([*pip, "-r", str(work / "requirements.txt"), "-d", str(work)])
    if done.returncode:
        sys.exit("error: pip could not fetch it, see above; it needs a package index (PIP_INDEX_URL, PIP_FIND_LINKS)")
    with tarfile.open(next(work.glob("transformers-*.tar.gz"))) as archive:
        members = [m for m in archive if m.isfile() and m.name.split("/")[1:2] == ["tests"]]
        archive.extractall(work, members=members, filter="data")
    next(work.glob("transformers-*/tests")).rename(work / "tests")
    work.rename(folder)
    return folder


def prepare(folder: Path) -> None:
    """Adds to the package ``tests`` what it lacks, and our tests."""
    for name, text in EMPTY.items():
        path = folder / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in (*HERE.glob("stand_ins/*.py"), HERE / "test_contract.py"):
        shutil.copy(path, folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Runs the tests.

    Args:
        arguments: pytest's.

    Returns:
        0 if every test ended as expected, otherwise 1.
    """
    folder = fetch_tests(transformers.__version__)
    prepare(folder)
    outcomes = Outcomes()
    options = ["-q", "--no-header", "--tb=no", "--no-summary", "-p", "no:cacheprovider"]
    options += ["-n", "2", "--dist", "worksteal"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        code = pytest.main([*options, f"--rootdir={folder}", "tests/test_contract.py", *arguments], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    expected = read_expected(HERE / "expected.toml", transformers.__version__)
    wrong = surprises(outcomes.found, expected)
    if not arguments:
        wrong |= {test: "is in expected.toml and not among the tests" for test in unknown(outcomes.found, expected)}
    for name, sentence in sorted(wrong.items()):
        print(f"\n{name} {sentence}")
        if outcomes.written.get(name):
            print(f"It wrote to its standard error, at the end:\n{outcomes.written[name]}")
    kinds = [outcome[0] if outcome else "passed" for outcome in outcomes.found.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "skipped", "failed"))
    print(f"{counts}, counting subtests; {len(wrong) or 'none'} not as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
