"""Futures of workers behave as those of ``concurrent.futures.ThreadPoolExecutor`` with one thread do."""

import concurrent.futures
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Empty

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streams import CPUStream, Task, spawn_workers, submit

from .fakes import PATIENCE, take, wait

CPU = torch.device("cpu")
FAILURES = [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit, BaseException]


def raiser(failure):
    def fail():
        raise failure

    return fail


def life(submits, works, cancelled):
    """What becomes of futures of ``works``, some of which are cancelled while the first one runs.

    For each: whether the cancellation was taken, the state, what its callback saw, and the result or the error.
    """
    started, gate, seen = threading.Event(), threading.Event(), {}

    def first():
        started.set()
        wait(gate)
        return "first"

    functions = [first, *((lambda work=work: work) if isinstance(work, int) else raiser(work) for work in works)]
    futures = [submits(function) for function in functions]
    for k, future in enumerate(futures):
        future.add_done_callback(lambda future, k=k: seen.__setitem__(k, future._state))
    wait(started)
    taken = [(k, futures[k].cancel()) for k in cancelled if k < len(futures)]
    states = [future._state for future in futures]
    gate.set()
    concurrent.futures.wait(futures, PATIENCE)
    return taken, states, seen, [outcome(future) for future in futures]


def outcome(future):
    if future.cancelled():
        return "cancelled"
    error = future.exception(PATIENCE)
    return type(error) if error is not None else future.result(PATIENCE)


@given(
    st.lists(st.integers(0, 9) | st.sampled_from([ZeroDivisionError, KeyboardInterrupt, SystemExit]), max_size=5),
    st.lists(st.integers(0, 5), max_size=5),
)
def test_they_live_as_those_of_an_executor(works, cancelled):
    with ThreadPoolExecutor(1) as executor:
        expected = life(executor.submit, works, cancelled)
    with spawn_workers([CPU]) as ([in_queue], [out_queue]):
        assert life(lambda function: submit(in_queue, function), works, cancelled) == expected
    assert take(out_queue) == (False, None)  # and nothing else


@pytest.mark.parametrize("failure", FAILURES)
def test_what_is_raised_is_the_same_error_with_its_traceback(failure):
    error = failure("boom")
    with spawn_workers([CPU]) as ([in_queue], _):
        future = submit(in_queue, raiser(error))
        with pytest.raises(failure, match="boom") as found:
            future.result(PATIENCE)
        assert found.value is error
        assert found.traceback[-1].name == "fail"
        assert submit(in_queue, lambda: "after").result(PATIENCE) == "after"


def test_tasks_and_futures_take_their_turns_and_each_has_one_answer():
    order = []
    with spawn_workers([CPU]) as ([in_queue], [out_queue]):
        tasks = [Task(CPUStream, compute=lambda k=k: order.append(k)) for k in (0, 2, 4)]
        futures = []
        for k, each in enumerate(tasks):
            in_queue.put(each)
            futures.append(submit(in_queue, lambda k=k: order.append(2 * k + 1)))
        for each in tasks:
            assert take(out_queue) == (True, (each, None))
        concurrent.futures.wait(futures, PATIENCE)
        with pytest.raises(Empty):
            out_queue.get_nowait()
    assert order == list(range(6))


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_callback_that_fails_is_logged_and_the_worker_goes_on(failure, caplog):
    with spawn_workers([CPU]) as ([in_queue], _):
        gate = threading.Event()
        future = submit(in_queue, lambda: wait(gate))
        future.add_done_callback(lambda _: raiser(failure)())
        gate.set()
        assert submit(in_queue, lambda: "after").result(PATIENCE) == "after"
    assert failure.__name__ in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"), [({"function": 3}, "compute must be callable"), ({"stream": None}, "stream must be")]
)
def test_what_cannot_be_done_is_refused_before_it_is_queued(arguments, message):
    with (
        spawn_workers([CPU]) as ([in_queue], _),
        pytest.raises(TypeError, match=message),
    ):
        submit(in_queue, arguments.pop("function", int), **arguments)
