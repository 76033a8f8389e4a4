import gc
import traceback
import weakref
from queue import SimpleQueue
from threading import Event, Thread

import pytest
import torch

from streams import CPUStream, Task, current_stream, new_stream, spawn_workers, worker

from .cuda import DEVICE
from .fakes import PATIENCE, awake, take, wait

CPU = torch.device("cpu")
FAILURES = [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, BaseException]


def answers(*tasks, device=CPU, grad_mode=True):
    """All that a worker says to ``tasks``."""
    in_queue, out_queue = SimpleQueue(), SimpleQueue()
    for task in (*tasks, None):
        in_queue.put(task)
    thread = Thread(target=worker, args=(in_queue, out_queue, device, grad_mode), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return [take(out_queue) for _ in range(out_queue.qsize())]


def task(compute):
    return Task(CPUStream, compute=compute)


def test_none_ends_it_and_that_is_answered():
    assert answers() == [(False, None)]


def test_tasks_are_answered_in_order():
    tasks = [task(lambda i=i: i) for i in range(5)]
    assert answers(*tasks) == [*((True, (each, i)) for i, each in enumerate(tasks)), (False, None)]


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_delivered_with_its_traceback_and_the_next_task_runs(failure):
    def culprit():
        raise failure("boom")

    after = task(lambda: "after")
    (ok, (kind, error, where)), *rest = answers(task(culprit), after)
    assert not ok
    assert kind is type(error) is failure
    assert error.args == ("boom",)
    assert traceback.extract_tb(where)[-1].name == "culprit"
    assert rest == [(True, (after, "after")), (False, None)]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_grad_mode_is_as_said(grad_mode):
    said, *_ = answers(task(torch.is_grad_enabled), grad_mode=grad_mode)
    assert said[1][1] is grad_mode


def test_called_without_a_thread_it_leaves_the_grad_mode_as_it_was():
    in_queue, out_queue = SimpleQueue(), SimpleQueue()
    in_queue.put(None)
    worker(in_queue, out_queue, CPU, False)
    assert torch.is_grad_enabled()


def test_a_device_that_cannot_be_taken_is_the_answer_to_every_task():
    never = task(lambda: pytest.fail("this ran without its device"))
    first, second, end = answers(never, never, device=torch.device("cuda", 99))
    for ok, (kind, error, _) in (first, second):
        assert not ok
        assert kind is ValueError
        assert "cuda:99" in str(error)
    assert end == (False, None)


class Thing:
    """Something that tells when it is gone."""

    def __init__(self):
        self.gone = Event()
        weakref.finalize(self, self.gone.set)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_while_it_waits_it_holds_neither_task_nor_result():
    with spawn_workers([CPU]) as ([in_queue], [out_queue]):
        argument = Thing()
        in_queue.put(task(lambda it=argument: (it, Thing())))
        argument = argument.gone
        _, (done, (_, result)) = take(out_queue)
        result, ended = result.gone, weakref.ref(done)
        del done, _
        awake(in_queue)
        wait(argument)
        wait(result)
        assert ended() is None


@pytest.mark.usefixtures("no_collector")
def test_while_it_waits_it_holds_nothing_of_a_failure():
    class BoomError(Exception):
        pass

    def fail(it):
        raise BoomError(it)

    with spawn_workers([CPU]) as ([in_queue], [out_queue]):
        argument = Thing()
        in_queue.put(task(lambda it=argument: fail(it)))
        argument = argument.gone
        ok, exc_info = take(out_queue)
        assert not ok
        error = weakref.ref(exc_info[1])
        del exc_info
        awake(in_queue)
        wait(argument)
        assert error() is None


@pytest.mark.cuda
def test_the_device_and_the_stream_are_current():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    stream = new_stream(last)
    run = Task(stream, compute=lambda: (torch.cuda.current_device(), current_stream(last)))
    (ok, (_, said)), _ = answers(run, device=last)
    assert ok
    assert said == (last.index, stream)


@pytest.mark.cuda
def test_results_of_two_workers_streams_meet_after_a_wait():
    from streams import wait_stream

    from .cuda import sleep, warm_up

    warm_up()
    here = current_stream(DEVICE)
    streams = [new_stream(DEVICE) for _ in range(2)]
    xs = [torch.zeros(1000, device=DEVICE) for _ in streams]
    torch.cuda.synchronize()
    with spawn_workers([DEVICE, DEVICE], shared=False) as (in_queues, out_queues):
        for stream, queue, x in zip(streams, in_queues, xs, strict=True):
            queue.put(
                Task(
                    stream,
                    compute=lambda x=x: (sleep(), x.fill_(1))[1],
                    finalize=lambda _, stream=stream: wait_stream(here, stream),
                )
            )
        for queue in out_queues:
            ok, (done, result) = take(queue)
            assert ok
            done.finalize(result)
    assert sum(x.sum() for x in xs).item() == 2000
