"""The scheduler of tests finds races and deadlocks at once, repeats them, and tries each order once."""

from collections.abc import Callable
from math import comb
from typing import Any

import pytest
import torch

from streams import Context, CPUStream, Task, spawn_workers, waiting

from .interleavings.choices import Recorded
from .interleavings.explore import explore, repeat, run, sample
from .interleavings.objects import active
from .interleavings.scheduler import FAIL, INTERRUPT, DeadlockError, InjectedError


def together(*works: Callable[[], Any]) -> None:
    threads = [waiting.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def step(name: str = "step") -> None:
    active[-1].step(name)


def lost_update() -> None:
    found = [0]

    def add() -> None:
        before = found[0]
        step()
        found[0] = before + 1

    together(add, add)
    assert found == [2]


def opposite_locks() -> None:
    a, b = waiting.Lock(), waiting.Lock()

    def both(first: Any, second: Any) -> None:
        with first, second:
            pass

    together(lambda: both(a, b), lambda: both(b, a))


def lost_wake_up() -> None:
    condition, ready = waiting.Condition(), []

    def waits() -> None:
        if not ready:  # checked without the lock
            with condition:
                condition.wait()

    def wakes() -> None:
        ready.append(True)
        with condition:
            condition.notify_all()

    together(waits, wakes)


def late_flag() -> None:
    queue, flag = waiting.SimpleQueue(), []

    def sends() -> None:
        queue.put(1)
        flag.append(True)

    def receives() -> None:
        queue.get()
        assert flag

    together(sends, receives)


def too_few_turns() -> None:
    semaphore = waiting.Semaphore(0)
    together(semaphore.acquire, semaphore.release, semaphore.acquire)


def left_thread() -> None:
    waiting.Thread(target=waiting.Event().wait).start()


def died() -> None:
    together(lambda: 1 / 0)


WRONG = [lost_update, opposite_locks, lost_wake_up, late_flag, too_few_turns, left_thread, died]


@pytest.mark.parametrize("program", WRONG)
def test_mistakes_are_found_and_repeated(program: Callable[[], None]) -> None:
    found = explore(program, preemptions=1)
    (failure,) = found.failures
    with pytest.raises(type(failure.error)):
        repeat(program, failure.indices)
    assert run(program, Recorded(failure.indices)).events == failure.events


@pytest.mark.parametrize("program", [lost_update, opposite_locks, lost_wake_up, late_flag])
def test_random_priorities_find_each_mistake_too(program: Callable[[], None]) -> None:
    assert sample(program, runs=100).failures


def test_deadlock_reports_stack_of_each_thread() -> None:
    (failure,) = explore(opposite_locks, preemptions=1).failures
    assert isinstance(failure.error, DeadlockError)
    assert str(failure.error).count("in both\n    with first, second") == 2


@pytest.mark.parametrize("steps", [1, 2])
def test_every_interleaving_of_two_threads_is_tried_once(steps: int) -> None:
    orders = set()

    def program() -> None:
        order = []

        def work(name: str) -> None:
            for _ in range(steps):
                step()
                order.append(name)

        together(lambda: work("a"), lambda: work("b"))
        orders.add("".join(order))

    found = explore(program, preemptions=20, most=10**6)
    assert found.complete == 20
    assert len(orders) == comb(2 * steps, steps)


def test_of_a_program_without_races_every_interleaving_passes() -> None:
    def program() -> None:
        queue, answers = waiting.SimpleQueue(), waiting.SimpleQueue()
        together(lambda: answers.put(queue.get() + queue.get()), lambda: queue.put(1), lambda: queue.put(2))
        assert answers.get() == 3

    found = explore(program, preemptions=2)
    assert (found.failures, found.complete) == ((), 2)
    assert found.runs > 10


def test_timeouts_fire_if_blocked_or_chosen() -> None:
    outcomes = set()

    def program() -> None:
        event = waiting.Event()
        thread = waiting.Thread(target=event.set)
        thread.start()
        outcomes.add(event.wait(timeout=3600))
        thread.join()
        assert not waiting.Semaphore(0).acquire(timeout=3600)

    assert not explore(program, preemptions=1).failures
    assert outcomes == {False, True}


def test_failures_and_interrupts_are_injected_once_per_place() -> None:
    outcomes = set()

    def program() -> None:
        queue, failed = waiting.SimpleQueue(), []

        def work() -> None:
            try:
                active[-1].step("fails", fails=True)
            except InjectedError:
                failed.append("failed")
            queue.put(None)

        thread = waiting.Thread(target=work)
        try:
            thread.start()
            queue.get()
            outcomes.add(tuple(failed))
        except KeyboardInterrupt:
            outcomes.add("interrupted")
            thread.join()

    found = explore(program, preemptions=1, injections=1, injects=(FAIL, INTERRUPT))
    assert not found.failures
    assert outcomes == {(), ("failed",), "interrupted"}
    assert 0 < found.injected < found.runs


def test_thread_pool_matches_standard_library() -> None:
    def program() -> None:
        pool = waiting.ThreadPoolExecutor(2)
        futures = [pool.submit(pow, 2, k) for k in range(3)]
        assert [future.result() for future in futures] == [1, 2, 4]
        pool.shutdown()

    found = explore(program, preemptions=0)
    assert (found.failures, found.complete) == ((), 0)


def compute(numbers: list[int], *, closes: bool = True) -> None:
    """Two workers answer some tasks."""
    devices = [torch.device("cpu")] * 2
    block = spawn_workers(devices, shared=False, context=Context.plain())
    in_queues, out_queues = block.__enter__()
    for k in numbers:
        in_queues[k % 2].put(Task(CPUStream, compute=lambda k=k: k))
    assert [out_queues[k % 2].get()[1][1] for k in numbers] == numbers
    if closes:
        block.__exit__(None, None, None)


@pytest.mark.parametrize("closes", [True, False])
def test_workers_end_with_their_block(closes: bool) -> None:
    found = explore(lambda: compute([0, 1], closes=closes), preemptions=1)
    assert (found.failures, found.complete) == ((), 1)
