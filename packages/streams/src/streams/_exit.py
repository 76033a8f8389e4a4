"""The interpreter's exit: workers that nobody ended must neither hold it up nor make it crash.

A thread that comes out of a torch operation while the interpreter is being taken down is ended by force in the middle
of C++, which aborts the process ("terminate called without an active exception") and hides its exit status. So they are
asked to go before: those that wait for a task go at once, those that compute one at their next line of Python. An
operation cannot be interrupted, so the exit waits for its end.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Collection
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any

PATIENCE = 0.5
"""Seconds after which those that have not computed meanwhile count as stuck in waits of their own: harmless."""
_COMPUTING = 0.01 * PATIENCE
"""Processor time that a thread which computes takes at least in these seconds; one that looks around takes less."""

_workers: dict[Thread, tuple[SimpleQueue[Any], int | None]] = {}
"""From where each worker takes its tasks, and the clock of the processor time that it takes.

Workers write to it at any time, so that it is copied in one operation before it is gone through.
"""


def watch(in_queue: SimpleQueue[Any]) -> None:
    """Send this thread, which takes its tasks from ``in_queue``, away at exit if it is still there."""
    thread = current_thread()
    assert thread.ident is not None
    # Only a thread itself can safely ask for its clock: of one that has ended that may crash.
    clock = time.pthread_getcpuclockid(thread.ident) if hasattr(time, "pthread_getcpuclockid") else None
    _workers[thread] = in_queue, clock


def unwatch() -> None:
    """This thread ends."""
    _workers.pop(current_thread(), None)


def _after_fork() -> None:
    """In the child only the thread that forked is left."""
    own = _workers.get(current_thread())
    _workers.clear()
    if own is not None:
        _workers[current_thread()] = own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _send_all_away() -> None:
    for in_queue, _ in list(_workers.values()):
        _drop(in_queue)
        in_queue.put(None)
    while _wait():
        pass


def _wait() -> bool:
    """Interrupt all workers and give them some time to go; whether any that is left has computed meanwhile."""
    clocks = {thread: clock for thread, (_, clock) in list(_workers.items()) if thread.is_alive()}
    before = {thread: _seconds(clock) for thread, clock in clocks.items()}
    for thread in before:
        _interrupt(thread)
    _join(before)
    left = {thread: seconds for thread, seconds in before.items() if thread.is_alive()}
    return any(_seconds(clocks[thread]) - seconds > _COMPUTING for thread, seconds in left.items())


def _join(threads: Collection[Thread]) -> None:
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _seconds(clock: int | None) -> float:
    """The processor time that a thread has taken; always the same where there is no telling."""
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:  # it has just ended
        return 0.0


def _drop(queue: SimpleQueue[Any]) -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        pass


def _interrupt(thread: Thread) -> None:
    """Raise SystemExit in ``thread`` at its next line of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
