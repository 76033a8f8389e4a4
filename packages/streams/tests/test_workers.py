"""Workers answer every task once, in order, and none is left behind, whatever happens."""

import gc
import os
import sys
import threading
import traceback
import weakref
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Event

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from streams import Context, CPUStream, Task, spawn_workers, waiting, worker

from .fakes import FakeDevice, in_child, in_thread, started_from_now, take, wait

CPU = torch.device("cpu")
FAILURES = [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, BaseException]


def task(compute):
    return Task(CPUStream, compute=compute)


def raiser(failure):
    def fail():
        raise failure

    return fail


class Workers(RuleBasedStateMachine):
    """Random use of 1 to 8 workers, compared with a list of each worker's expected answers."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.gates = []
        self.threads_before = set(threading.enumerate())

    @initialize(homes=st.lists(st.integers(0, 3), min_size=1, max_size=8), shared=st.booleans())
    def open(self, homes, shared):
        devices = [FakeDevice() for _ in range(4)]
        self.ins, self.outs = self.stack.enter_context(spawn_workers([devices[home] for home in homes], shared))
        self.threads = set(threading.enumerate()) - self.threads_before
        # Entries with one device have one worker, unless each has its own.
        self.worker = homes if shared else list(range(len(homes)))
        self.due = {worker: [] for worker in self.worker}
        self.closed = set()
        assert len(self.threads) == len(self.due)

    def entry(self, data):
        return data.draw(st.integers(0, len(self.ins) - 1), label="entry")

    def put(self, entry, each, expected):
        if self.worker[entry] not in self.closed:
            self.ins[entry].put(each)
            self.due[self.worker[entry]].append(expected)

    @rule(data=st.data(), result=st.integers())
    def succeed(self, data, result):
        each = task(lambda: result)
        self.put(self.entry(data), each, (True, each, result))

    @rule(data=st.data(), kind=st.sampled_from(FAILURES))
    def fail(self, data, kind):
        failure = kind("boom")
        each = task(raiser(failure))
        self.put(self.entry(data), each, (False, each, failure))

    @rule(data=st.data())
    def block(self, data):
        gate = Event()
        self.gates.append(gate)
        each = task(lambda: wait(gate))
        self.put(self.entry(data), each, (True, each, None))

    @precondition(lambda self: self.gates)
    @rule()
    def unblock(self):
        self.gates.pop(0).set()

    @rule(data=st.data())
    def close(self, data):
        entry = self.entry(data)
        self.put(entry, None, None)
        self.closed.add(self.worker[entry])

    @precondition(lambda self: not self.gates)
    @rule(data=st.data())
    def answer(self, data):
        self.check_next(self.entry(data))

    def check_next(self, entry):
        if not self.due[self.worker[entry]]:
            return
        expected, answer = self.due[self.worker[entry]].pop(0), take(self.outs[entry])
        if expected is None:
            assert answer == (False, None)
        elif expected[0]:
            assert answer == (True, expected[1:])
        else:
            ok, (kind, error, where) = answer
            assert not ok
            assert error is expected[2]
            assert kind is type(error)
            assert error.__traceback__ is where
            assert traceback.extract_tb(where)[-1].name == "fail"

    @rule(data=st.data(), failure=st.sampled_from([None, *FAILURES]))
    def leave(self, data, failure):
        self.finish(failure)
        self.stack = ExitStack()
        self.open(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)), data.draw(st.booleans()))

    def finish(self, failure):
        """Leave the block, raising ``failure`` in it; everything that was queued is answered then."""
        for gate in self.gates:
            gate.set()
        self.gates.clear()
        if failure is None:
            self.stack.close()
        else:
            with pytest.raises(failure), self.stack:
                raise failure
        assert not self.threads & set(threading.enumerate())
        for entry, home in enumerate(self.worker):
            if home not in self.closed:
                self.closed.add(home)
                self.due[home].append(None)
            while self.due[home]:
                self.check_next(entry)
            with pytest.raises(Empty):
                self.outs[entry].get_nowait()

    def teardown(self):
        if hasattr(self, "ins"):
            self.finish(None)


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)


class Unhashable(FakeDevice):
    __hash__ = None


@pytest.mark.parametrize(
    ("devices", "kind", "message"),
    [
        (["cpu"], TypeError, r"devices\[0\] must have a \.type"),
        ([CPU, CPU, None], TypeError, r"devices\[2\] must have a \.type"),
        ([CPU, Unhashable()], TypeError, r"devices\[1\] must be hashable"),
        ([torch.device("cuda", 99)], ValueError, r"devices\[0\] is cuda:99, but torch sees \d+ CUDA devices"),
    ],
)
def test_invalid_device_raises_and_starts_no_thread(devices, kind, message):
    started = started_from_now()
    with pytest.raises(kind, match=message):
        spawn_workers(devices)
    assert not started()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_failing_context_fails_every_task(kind):
    """Otherwise the caller would wait forever for a dead worker."""

    class Unenterable(Context):
        def applied(self):
            raise kind("not here")

    context = Unenterable.capture()
    with spawn_workers([torch.device("cpu")] * 2, shared=False, context=context) as (in_queues, out_queues):
        for _ in range(2):
            for queue in in_queues:
                queue.put(Task(CPUStream, compute=int))
            for queue in out_queues:
                done, answer = take(queue)
                assert not done
                assert answer[0] is kind
    assert [take(queue) for queue in out_queues] == [(False, None)] * 2


class Interrupted(Event):
    """The end of a worker; the first waits for it are interrupted."""

    interrupts = 0

    def wait(self, timeout=None):
        if Interrupted.interrupts > 0:
            Interrupted.interrupts -= 1
            raise KeyboardInterrupt
        return super().wait(timeout)


@pytest.mark.parametrize("workers", [1, 3])
def test_interrupt_waits_for_workers_to_end(monkeypatch, workers):
    monkeypatch.setattr(waiting, "Event", Interrupted)
    monkeypatch.setattr(Interrupted, "interrupts", 1)
    started, finished = started_from_now(), []
    tasks = [task(lambda i=i: finished.append(i)) for i in range(5)]
    with pytest.raises(KeyboardInterrupt), spawn_workers([CPU] * workers, shared=False) as (in_queues, _):
        [queue.put(each) for queue in in_queues for each in tasks]
    assert sorted(finished) == sorted(list(range(5)) * workers)
    assert not started()


def test_a_forgotten_block_lets_its_workers_go():
    block = spawn_workers([CPU])
    [in_queue], [out_queue] = block.__enter__()
    in_queue.put(task(lambda: 42))
    del block
    assert take(out_queue)[1][1] == 42
    assert take(out_queue) == (False, None)


@pytest.mark.parametrize("in_cycle", [False, True])
def test_freeing_block_runs_no_python_code(in_cycle):
    """A signal could interrupt Python code in a finalizer. The interrupt would be discarded, and a worker left."""
    block = spawn_workers([CPU] * 2, shared=False)
    _, out_queues = block.__enter__()
    if in_cycle:
        block.itself = block
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame) if event == "call" else None)
    try:
        del block
        gc.collect()
    finally:
        sys.setprofile(None)
    assert not [frame for frame in called if frame.f_globals["__name__"].split(".")[0] == "streams"]
    assert [take(queue) for queue in out_queues] == [(False, None)] * 2


@pytest.mark.parametrize("devices", [[CPU], [CPU, FakeDevice()]])
def test_block_cannot_be_entered_twice(devices):
    block = spawn_workers(devices)
    started = started_from_now()
    for _ in range(2):
        with block as (in_queues, out_queues):
            workers = started()
            with pytest.raises(RuntimeError, match="entered already"), block:
                pytest.fail("there would be two sets of workers")
            assert started() == workers
            for in_queue, out_queue in zip(in_queues, out_queues, strict=True):
                in_queue.put(task(lambda: 42))
                assert take(out_queue)[1][1] == 42
        assert not started()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
class TestForks:
    """The workers do not exist in a forked process."""

    @staticmethod
    def rest(queue):
        """Return the remaining answers in a queue, up to the worker's final one."""
        answers = []
        while (answer := take(queue)) != (False, None):
            answers.append(answer[1][1])
        return answers

    @pytest.mark.parametrize("busy", [True, False])
    def test_forked_child_may_leave_block(self, busy):
        started, gate = Event(), Event()

        def leave():
            block.__exit__(None, None, None)
            return [self.rest(queue) for queue in out_queues]

        block = spawn_workers([CPU] * 2, shared=False)
        in_queues, out_queues = block.__enter__()
        in_queues[0].put(task(lambda: "done"))
        in_queues[1].put(task(lambda: [started.set(), busy and wait(gate)][1]))
        wait(started)
        while out_queues[0].empty() or (out_queues[1].empty() and not busy):
            os.sched_yield()
        assert in_child(leave) == str([["done"], [] if busy else [False]])
        gate.set()
        block.__exit__(None, None, None)
        assert [self.rest(queue) for queue in out_queues] == [["done"], [None if busy else False]]


def test_unavailable_device_fails_every_task():
    never = task(lambda: pytest.fail("this ran without its device"))
    in_queue, out_queue = SimpleQueue(), SimpleQueue()
    for each in (never, never, None):
        in_queue.put(each)
    in_thread(lambda: worker(in_queue, out_queue, torch.device("cuda", 99), True))
    first, second, end = (take(out_queue) for _ in range(out_queue.qsize()))
    for ok, (kind, error, _) in (first, second):
        assert not ok
        assert kind is ValueError
        assert "cuda:99" in str(error)
    assert end == (False, None)


class Thing:
    """An object that signals when it is freed."""

    def __init__(self):
        self.gone = Event()
        weakref.finalize(self, self.gone.set)


class BoomError(Exception):
    pass


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("fails", [False, True])
def test_idle_worker_releases_its_last_task(fails):
    def compute(argument):
        if fails:
            raise BoomError(argument)
        return argument, Thing()

    with spawn_workers([CPU]) as ([in_queue], [out_queue]):
        argument = Thing()
        in_queue.put(task(lambda it=argument: compute(it)))
        argument = argument.gone
        ok, payload = take(out_queue)
        assert ok is not fails
        result = argument if fails else payload[1][1].gone
        ended = weakref.ref(payload[1] if fails else payload[0])
        del payload
        wait(argument)
        wait(result)
        assert ended() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"compute": 3}, "compute must be callable"), ({"compute": int, "finalize": 3}, "finalize must take the result")],
)
def test_invalid_task_raises_before_queueing(arguments, message):
    with pytest.raises(TypeError, match=message):
        Task(CPUStream, **arguments)
