"""The intra-op threads of one thread: limited to a number, and stopped on request."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streams import _threads, limit_threads, pause_helpers

from .fakes import PATIENCE, in_thread

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count helper threads")
NUMBERS = st.integers(1, 4)


def system_threads():
    return set(os.listdir("/proc/self/task"))


def helpers():
    """Return how many helper threads the operations of this thread start."""
    before = system_threads()
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64), torch.ones(64))
    torch.ones(500, 500) @ torch.ones(500, 500)
    torch.nn.functional.gelu(torch.ones(500, 500))
    torch.nn.functional.conv2d(torch.ones(8, 3, 32, 32), torch.ones(8, 3, 3, 3))
    return len(system_threads() - before)


def limited(number):
    """Limit a fresh thread, and return its number of threads and of helpers."""
    limit_threads(number)
    return torch.get_num_threads(), helpers()


def everybody_elses():
    return torch.get_num_threads(), in_thread(torch.get_num_threads)


@pytest.fixture(params=["through the libraries", "where they cannot be reached"])
def way(request, monkeypatch):
    if request.param == "where they cannot be reached":
        monkeypatch.setattr(_threads, "native", lambda name: None)


@pytest.fixture
def process_said_two():
    """Set the number of threads for the whole process, which every new thread reads at its first operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_proc
@pytest.mark.usefixtures("way", "process_said_two")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_limit_threads_applies_to_one_thread(number):
    before = everybody_elses()
    assert in_thread(lambda: limited(number)) == (number, number - 1)
    assert everybody_elses() == before


@needs_proc
@given(st.lists(NUMBERS, min_size=2, max_size=4))
@settings(max_examples=20)
def test_threads_that_live_together_keep_their_own_numbers(numbers):
    before = everybody_elses()
    meet = threading.Barrier(len(numbers))

    def run(number):
        limit_threads(number)
        meet.wait(PATIENCE)
        torch.ones(200, 200) @ torch.ones(200, 200)
        return torch.get_num_threads()

    with ThreadPoolExecutor(len(numbers)) as executor:
        assert list(executor.map(run, numbers)) == numbers
    assert everybody_elses() == before


@pytest.mark.parametrize(
    ("junk", "kind", "message"),
    [
        *((junk, TypeError, "number of threads must be an int; got") for junk in (1.0, True, "2")),
        *((junk, ValueError, f"to 2147483647; got {junk}") for junk in (0, -1, 2**31, 2**32 + 1, 2**100)),
    ],
)
def test_what_is_no_number_of_threads_is_named(junk, kind, message):
    before = torch.get_num_threads()
    with pytest.raises(kind, match=message):
        limit_threads(junk)
    assert torch.get_num_threads() == before


def have_ended(threads):
    """Wait until these threads have exited. The time limit is the test's."""
    while threads & system_threads():
        os.sched_yield()
    return True


@needs_proc
def test_helpers_end_and_come_back():
    def run():
        limit_threads(3)
        found = []
        for _ in range(3):
            before = system_threads()
            torch.nn.functional.gelu(torch.ones(500, 500))
            # Compare ids, because threads of other tests may end in between.
            brought = system_threads() - before
            found.append((len(brought), pause_helpers() and have_ended(brought)))
        return found

    assert in_thread(run) == [(2, True)] * 3
