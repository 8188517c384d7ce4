"""Fixtures of the evaluation tests; what needs lm-eval skips without it."""

import functools

import pytest

from dcformer.synthetic import generate_dataset, write_dataset


@pytest.fixture(scope="session")
def lm_eval():
    return pytest.importorskip("lm_eval", reason="needs the extra [eval]")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would fork


@pytest.fixture(scope="session", autouse=True)
def _index_once():
    """lm-eval reads its 14,000 task files for every command line; here once."""
    try:
        from lm_eval.tasks._index import TaskIndex
    except ImportError:
        yield
        return
    build = TaskIndex.build
    one = functools.cache(lambda path: build([path]))

    def build_once(paths):
        paths = list(paths)
        if [path.name for path in paths[:1]] != ["tasks"] or "lm_eval" not in paths[0].parts:
            return build(paths)
        return {**one(paths[0]), **build(paths[1:])}

    patch = pytest.MonkeyPatch()
    patch.setattr(TaskIndex, "build", staticmethod(build_once))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def paper_file(tmp_path_factory):
    """A small file in the format of the paper's synthetic set, made by our generator."""
    path = tmp_path_factory.mktemp("data") / "synthetic_dataset.jsonl"
    write_dataset(generate_dataset("test", contexts_per_task=1, num_examples=8, seed=3).select(range(0, 74, 6)), path)
    return path
