"""Helper threads of parallel operations end when they are told to, and only those of the thread that says so."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from streams import _idle, limit_threads, pause_helpers

from .fakes import in_child, in_thread

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count helper threads")
pytestmark = pytest.mark.timeout(60)


def system_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def compute_in_parallel() -> None:
    torch.nn.functional.gelu(torch.ones(500, 500))


def reaches(count: int) -> bool:
    """Whether as many threads are left: an ended one takes a moment to disappear, and the time limit is the test's."""
    while system_threads() > count:
        os.sched_yield()
    return system_threads() == count


@needs_proc
def test_helpers_end_and_come_back() -> None:
    def run() -> list[bool]:
        limit_threads(3)
        before = system_threads()
        found = []
        for _ in range(3):
            compute_in_parallel()
            found.append(system_threads() == before + 2)
            found.append(pause_helpers() and reaches(before))
        return found

    assert in_thread(run) == [True] * 6


@needs_proc
def test_helpers_of_other_threads_stay() -> None:
    ready, done = threading.Event(), threading.Event()

    def other() -> None:
        limit_threads(2)
        compute_in_parallel()
        ready.set()
        done.wait(30)

    def run() -> int:
        limit_threads(2)
        compute_in_parallel()
        with_ours = system_threads()
        pause_helpers()
        assert reaches(with_ours - 1)
        return with_ours - 1 - system_threads()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    try:
        assert ready.wait(30)
        assert in_thread(run) == 0
    finally:
        done.set()
        thread.join(30)


def test_where_openmp_cannot_be_reached_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_idle, "native", lambda name: None)
    assert pause_helpers() is False


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_wait_for_helpers_that_stayed_in_the_parent() -> None:
    def run() -> str:
        limit_threads(2)
        compute_in_parallel()
        return in_child(lambda: (pause_helpers(), in_thread(pause_helpers)))

    assert in_thread(run) in ("(False, True)", "(False, False)")
