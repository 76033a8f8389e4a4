import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streams import _threads, limit_threads

from .fakes import in_thread

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count helper threads")
NUMBERS = st.integers(1, 4)


def system_threads():
    return set(os.listdir("/proc/self/task"))


def helpers():
    """How many threads the operations of this one bring up."""
    before = system_threads()
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64), torch.ones(64))
    torch.ones(500, 500) @ torch.ones(500, 500)
    torch.nn.functional.gelu(torch.ones(500, 500))
    torch.nn.functional.conv2d(torch.ones(8, 3, 32, 32), torch.ones(8, 3, 3, 3))
    return len(system_threads() - before)


def limited(number):
    """What a fresh thread says, and how many helpers it takes, after it was limited."""
    limit_threads(number)
    return torch.get_num_threads(), helpers()


def everybody_elses():
    return torch.get_num_threads(), in_thread(torch.get_num_threads)


@pytest.fixture(params=["through the libraries", "where they cannot be reached"])
def way(request, monkeypatch):
    if request.param == "where they cannot be reached":
        monkeypatch.setattr(_threads, "_setters", lambda: ())


@pytest.fixture
def process_said_two():
    """The number was set for the process before: every new thread is told about it at its first operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_proc
@pytest.mark.usefixtures("way", "process_said_two")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_thread_runs_with_as_many_threads_as_it_is_limited_to(number):
    before = everybody_elses()
    assert in_thread(lambda: limited(number)) == (number, number - 1)
    assert everybody_elses() == before


@needs_proc
@given(st.lists(NUMBERS, min_size=2, max_size=4))
@settings(max_examples=20)
def test_threads_that_live_together_keep_their_own_numbers(numbers):
    before = everybody_elses()
    meet = threading.Barrier(len(numbers))
    said = {}

    def run(i):
        limit_threads(numbers[i])
        meet.wait(30)
        torch.ones(200, 200) @ torch.ones(200, 200)
        said[i] = torch.get_num_threads()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(numbers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [said[i] for i in range(len(numbers))] == numbers
    assert everybody_elses() == before


@needs_proc
def test_a_number_may_be_changed():
    def twice():
        limit_threads(3)
        limit_threads(1)
        return torch.get_num_threads(), helpers()

    assert in_thread(twice) == (1, 0)


@pytest.mark.parametrize(("junk", "kind"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_what_is_no_number_of_threads_is_named(junk, kind):
    with pytest.raises(kind, match="number of threads must be"):
        limit_threads(junk)


@pytest.mark.parametrize("number", [2**31, 2**32 + 1, 2**40, 2**100])
def test_what_is_no_int_of_c_is_refused_with_the_bound(number):
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="at most 2147483647, .* got " + str(number)):
        limit_threads(number)
    assert torch.get_num_threads() == before
