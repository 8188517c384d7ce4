"""Marks of what float16 cannot hold. What kernels do about them is in test_attention_marks.py."""

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import pytest
import torch

from dcformer.kernels import overflow
from dcformer.kernels.overflow import Beyond

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch):
    monkeypatch.setattr(overflow, "_found", {})
    monkeypatch.setattr(overflow, "_watches", {})


def test_threads_that_begin_together_share_their_marks():
    """A mark that is not the one that is looked at would be left unseen."""
    count = 4
    for _ in range(25):
        overflow._watches.clear()
        barrier = Barrier(count)

        def mark(_, barrier=barrier):
            barrier.wait()
            return overflow.mark_of(HERE, Beyond.GRADIENTS).data_ptr()

        with ThreadPoolExecutor(count) as threads:
            assert len(set(threads.map(mark, range(count)))) == 1


def test_marks_are_found_one_after_another():
    """What float32 is needed for first: it may leave no other."""
    for what in Beyond:
        overflow.mark_of(HERE, what).fill_(1)
    assert overflow.look(HERE) and overflow.beyond(HERE) == Beyond.SCORES
    assert not overflow.look(HERE)
    overflow._found.clear()
    overflow.mark_of(HERE, Beyond.SCORES).fill_(0)
    assert overflow.look(HERE) and overflow.beyond(HERE) == Beyond.PRECISION
    assert overflow.look(HERE) and overflow.beyond(HERE) == Beyond.PRECISION | Beyond.GRADIENTS
    assert not overflow.look(HERE)


def test_a_mark_is_found_once():
    assert not overflow.look(HERE) and overflow.beyond(HERE) == overflow.NOTHING
    overflow.mark_of(HERE, Beyond.GRADIENTS).fill_(1)
    assert overflow.look(HERE) and overflow.beyond(HERE) == Beyond.GRADIENTS
    assert not overflow.look(HERE)
    overflow.mark_of(HERE, Beyond.SCORES).fill_(1)
    assert overflow.look(HERE) and overflow.beyond(HERE) == Beyond.GRADIENTS | Beyond.SCORES


def test_what_is_assumed_is_over_afterwards_but_for_what_was_found_meanwhile():
    overflow._found[HERE] = Beyond.PRECISION
    with pytest.raises(KeyError), overflow.assumed(HERE, Beyond.GRADIENTS):
        assert overflow.beyond(HERE) == Beyond.PRECISION | Beyond.GRADIENTS
        raise KeyError
    assert overflow.beyond(HERE) == Beyond.PRECISION
    with overflow.assumed(HERE, Beyond.GRADIENTS):
        overflow.mark_of(HERE, Beyond.SCORES).fill_(1)
        assert overflow.look(HERE)
    assert overflow.beyond(HERE) == Beyond.PRECISION | Beyond.SCORES


def test_a_mark_that_another_thread_finds_while_one_is_assumed_stays(monkeypatch):
    overflow.mark_of(HERE, Beyond.PRECISION).fill_(1)
    with ThreadPoolExecutor(1) as other:
        looks = []

        def count(device):
            """Between reading what was found and adding to it: the other thread has time, unless it has to wait."""
            looks.append(other.submit(overflow.look, device))
            wait(looks, timeout=0.2)
            return 0

        monkeypatch.setattr(overflow, "_calls", count)
        with overflow.assumed(HERE, Beyond.GRADIENTS):
            assert looks[0].result()
    assert overflow.beyond(HERE) == Beyond.PRECISION


def test_marks_that_two_threads_assume_are_over_with_them():
    first, second = (overflow.assumed(HERE, what) for what in (Beyond.GRADIENTS, Beyond.PRECISION))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert overflow.beyond(HERE) == Beyond.PRECISION
    second.__exit__(None, None, None)
    assert overflow.beyond(HERE) == overflow.NOTHING


def test_passes_of_a_self_check_are_not_among_the_first(monkeypatch):
    """Else a model's own first passes would not wait for their marks, in the process that checks."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(overflow, "is_captured", lambda device: False)
    with overflow.assumed(gpu, overflow.NOTHING):
        watch = overflow._watches[gpu] = overflow._Watch(torch.zeros(len(Beyond), 4, dtype=torch.int32))
        for _ in range(overflow.FIRST - 2):
            assert not overflow.look(gpu)
    with overflow.assumed(gpu, overflow.NOTHING):
        overflow.look(gpu)
    for _ in range(overflow.FIRST - 1):
        assert not overflow.look(gpu)
    watch.marks[list(Beyond).index(Beyond.PRECISION), 0] = 1
    assert overflow.look(gpu) and overflow.beyond(gpu) == Beyond.PRECISION
