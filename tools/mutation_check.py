"""Makes small wrong changes to copies of the source and tells which of them no test notices.

`mutations.py` lists the changes and, for each, the tests that are to notice it. The working tree is never changed: a
copy of `src` comes first on PYTHONPATH. A change counts as killed when one of its tests fails. Results are kept in a
JSON file until the changed file or the named tests change, so that a run goes on where the last one stopped.

    python tools/mutation_check.py [--only PATTERN] [--list] [--again]
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mutations import MUTATIONS, Mutation
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = Path("src") / "dcformer"

KILLED, SURVIVED, INVALID, TIMEOUT = "killed", "survived", "invalid", "timeout"


class ListError(Exception):
    """The list of mutations does not fit the source or the tests."""


def apply(mutation: Mutation, text: str) -> str:
    """The text of a file with the change made.

    Raises:
        ListError: when the old text is not there exactly once, or nothing would change.
    """
    count = text.count(mutation.old)
    if count != 1:
        raise ListError(
            f"{mutation.name}: its old text is {count} times in {mutation.file}, expected once. Bring the list up to "
            "date with the source."
        )
    if mutation.old == mutation.new:
        raise ListError(f"{mutation.name} changes nothing.")
    return text.replace(mutation.old, mutation.new)


def digest(root: Path, mutation: Mutation) -> str:
    """Of what a result depends on: the change, the file it is made in, its tests and what is around them.

    Changes to other files are taken to change no verdict, and neither are those of other tests.
    """
    total = hashlib.sha256(repr((mutation.old, mutation.new, mutation.tests)).encode())
    total.update((root / SOURCE / mutation.file).read_bytes())
    for name in sorted({test.partition("::")[0] for test in mutation.tests}):
        tree = ast.parse((root / name).read_text(encoding="utf-8"))
        named = {test.partition("::")[2].partition("[")[0] for test in mutation.tests if test.startswith(name)}
        others = [
            node for node in tree.body if getattr(node, "name", "").startswith("test_") and node.name not in named
        ]
        tree.body = [node for node in tree.body if node not in others]
        total.update(ast.dump(tree).encode())
    return total.hexdigest()


def copy_source(root: Path, folder: Path) -> Path:
    """Copies `src` into a folder, without what Python compiled. Returns the copy."""
    return Path(shutil.copytree(root / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__")))


def environment(root: Path, source: Path, interpreted: bool) -> dict[str, str]:
    """For a process that imports the package from `source`, and writes nothing into the repository."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(source), str(root / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1"),
    }
    variables.pop("TRITON_INTERPRET", None)
    return variables | ({"TRITON_INTERPRET": "1"} if interpreted else {})


def run_tests(
    root: Path, source: Path, tests: Iterable[str], interpreted: bool, timeout: int
) -> tuple[str, subprocess.CompletedProcess]:
    """Runs tests on a copy of the source until the first failure.

    Returns:
        "killed" when a test failed, or ended the process, "survived" when all passed, "invalid" when they could not be
        run; and the process.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={timeout}", *tests]
    run = subprocess.run(
        command,
        cwd=root,
        env=environment(root, source, interpreted),
        capture_output=True,
        text=True,
        timeout=2 * timeout,
        check=False,
    )
    # pytest: 0 all passed, 1 some failed, else they were not run to their end; skipped tests notice nothing. Below 0: a
    # signal, as of memory that is not the process's
    verdict = KILLED if run.returncode < 0 else {0: SURVIVED, 1: KILLED}.get(run.returncode, INVALID)
    if verdict == SURVIVED and not re.search(r"\d+ passed", run.stdout):
        verdict = INVALID
    return verdict, run


def judge(root: Path, mutation: Mutation, timeout: int) -> dict[str, str]:
    """Makes the change in a copy and runs its tests: a verdict, and what noticed it or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        source = copy_source(root, Path(folder))
        file = source / "dcformer" / mutation.file
        text = apply(mutation, file.read_text(encoding="utf-8"))
        try:
            compile(text, mutation.file, "exec")
        except SyntaxError as error:
            return {"verdict": INVALID, "by": str(error)}
        file.write_text(text, encoding="utf-8")
        try:
            verdict, run = run_tests(root, source, mutation.tests, mutation.needs_interpreter, timeout)
        except subprocess.TimeoutExpired:
            return {"verdict": TIMEOUT, "by": f"still running after {2 * timeout} s"}
    if verdict == INVALID:
        return {"verdict": verdict, "by": (run.stdout + run.stderr)[-1500:]}
    noticed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    ended = f"signal {-run.returncode}" if run.returncode < 0 else ""
    return {"verdict": verdict, "by": noticed.group(1) if noticed else ended}


def check_unchanged(root: Path, mutations: Sequence[Mutation], timeout: int) -> None:
    """Runs all tests of some mutations on the source as it is: a test that fails there says nothing about a change.

    Raises:
        ListError: when one fails, or the copy is not what is imported.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        source = copy_source(root, Path(folder))
        where = subprocess.run(
            [sys.executable, "-c", "import dcformer; print(dcformer.__file__)"],
            env=environment(root, source, False),
            capture_output=True,
            text=True,
            check=False,
        )
        if not where.stdout.startswith(str(source)):
            raise ListError(f"dcformer is not imported from the copy in {source}: {where.stdout}{where.stderr}")
        for interpreted in (False, True):
            chosen = [mutation for mutation in mutations if mutation.needs_interpreter == interpreted]
            tests = sorted({test for mutation in chosen for test in mutation.tests})
            if tests:
                verdict, run = run_tests(root, source, tests, interpreted, timeout * max(1, len(tests) // 2))
                if verdict != SURVIVED:
                    raise ListError(f"The tests must pass without a change:\n{run.stdout[-3000:]}{run.stderr[-1000:]}")


def table(mutations: Sequence[Mutation], verdicts: dict[str, str]) -> str:
    """How many changes were killed in each area, as text."""
    total = Counter(mutation.area for mutation in mutations)
    killed = Counter(mutation.area for mutation in mutations if verdicts[mutation.name] == KILLED)
    total["all"], killed["all"] = total.total(), killed.total()
    lines = [f"{'area':<14} {'mutations':>9} {'killed':>7} {'share':>7}"]
    lines += [f"{area:<14} {count:>9} {killed[area]:>7} {killed[area] / count:>7.1%}" for area, count in total.items()]
    return "\n".join(lines)


def main(
    arguments: Sequence[str] | None = None, root: Path = REPOSITORY, listed: Sequence[Mutation] = MUTATIONS
) -> int:
    """The command line: 0 when everything was killed, 1 when not, 2 when the list does not fit the source."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="PATTERN", help="regular expression for area and name of the mutations to run"
    )
    parser.add_argument("--list", action="store_true", help="list them and run nothing")
    parser.add_argument(
        "--again", action="store_true", help="run also what has a result, as after changes to other files"
    )
    parser.add_argument("--results", type=Path, default=root / "runs" / "mutation_check.json", help="where results are")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a test (default %(default)s)")
    options = parser.parse_args(arguments)

    mutations = [m for m in listed if options.only is None or re.search(options.only, f"{m.area} {m.name}")]
    if not mutations:
        print(f"error: no mutation's area and name match --only {options.only!r}; see --list", file=sys.stderr)
        return 2
    if options.list:
        for mutation in mutations:
            print(f"{mutation.area:<14} {mutation.name}  ({mutation.file})")
        return 0
    results: dict[str, dict[str, str]] = {}
    if options.results.is_file():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    keys = {mutation.name: digest(root, mutation) for mutation in mutations}
    waiting = [m for m in mutations if options.again or results.get(m.name, {}).get("digest") != keys[m.name]]
    try:
        for mutation in mutations:
            apply(mutation, (root / SOURCE / mutation.file).read_text(encoding="utf-8"))
        if waiting:
            print(f"{len(waiting)} of {len(mutations)} mutations to run; first their tests without a change")
            check_unchanged(root, waiting, options.timeout)
    except ListError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tqdm(waiting, unit="mutation") as bar:
        for mutation in bar:
            bar.set_postfix_str(mutation.name)
            results[mutation.name] = judge(root, mutation, options.timeout) | {"digest": keys[mutation.name]}
            options.results.parent.mkdir(parents=True, exist_ok=True)
            temporary = options.results.with_suffix(".tmp")
            temporary.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            temporary.replace(options.results)
    verdicts = {mutation.name: results[mutation.name]["verdict"] for mutation in mutations}
    print(table(mutations, verdicts))
    for mutation in mutations:
        if verdicts[mutation.name] != KILLED:
            print(f"{verdicts[mutation.name]}: {mutation.area} {mutation.name} {results[mutation.name]['by']}")
    return int(set(verdicts.values()) != {KILLED})


if __name__ == "__main__":
    raise SystemExit(main())
