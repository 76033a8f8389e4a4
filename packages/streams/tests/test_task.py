import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streams import CPUStream, Task, current_stream, new_stream

from .cuda import DEVICE


@given(st.integers() | st.text() | st.none() | st.tuples(st.integers()))
def test_finalize_gets_what_compute_returned(result):
    got = []
    task = Task(CPUStream, compute=lambda: result, finalize=got.append)
    task.finalize(task.compute())
    assert got == [result]
    assert got[0] is result


def test_there_may_be_nothing_to_finalize():
    assert Task(CPUStream, compute=lambda: 42).finalize(42) is None


def test_compute_runs_each_time_and_never_by_itself():
    calls = []
    task = Task(CPUStream, compute=lambda: calls.append(len(calls)))
    assert calls == []
    task.compute()
    task.compute()
    assert calls == [0, 1]


def test_halves_raise_as_they_are():
    def fail(*_):
        raise KeyboardInterrupt("mine")

    task = Task(CPUStream, compute=fail, finalize=fail)
    with pytest.raises(KeyboardInterrupt, match="mine"):
        task.compute()
    with pytest.raises(KeyboardInterrupt, match="mine"):
        task.finalize(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream": None, "compute": int}, "stream must be CPUStream"),
        ({"stream": CPUStream, "compute": 3}, "compute must be callable"),
        ({"stream": CPUStream, "compute": int, "finalize": 3}, "finalize must take the result"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_queued(arguments, message):
    with pytest.raises(TypeError, match=message):
        Task(**arguments)


@pytest.mark.cuda
def test_both_halves_run_under_the_stream():
    stream, seen = new_stream(DEVICE), []
    task = Task(
        stream, compute=lambda: current_stream(DEVICE), finalize=lambda _: seen.append(torch.cuda.current_stream())
    )
    assert task.compute() == stream
    task.finalize(None)
    assert seen == [stream]
    assert current_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
