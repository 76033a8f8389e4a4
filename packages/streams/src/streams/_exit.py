"""The exit of the interpreter: workers that were not ended must neither delay it nor crash it.

While the interpreter shuts down, a thread that returns from a torch operation is killed in the middle of C++. That
aborts the process ("terminate called without an active exception") and hides its exit status. So workers are told to
end before that: those that wait for a task end at once, those that compute one at their next line of Python. An
operation cannot be interrupted, so the exit waits for its end.
"""

import atexit
import ctypes
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any

PATIENCE = 0.5
"""Seconds after which a worker that has not computed meanwhile counts as blocked in a wait, where it does no harm."""
_COMPUTING = 0.01 * PATIENCE
"""Seconds of processor time that a computing thread takes at least meanwhile; one that only wakes up takes less."""

_workers: dict[Thread, tuple[SimpleQueue[Any], int | None]] = {}
"""For each worker the queue of its tasks, and the clock of its processor time.

Workers change this dict at any time; so it is copied in one operation before iteration. In a forked process the workers
of the parent are in it too, but ``is_alive`` is False for them.
"""


def watch(in_queue: SimpleQueue[Any]) -> None:
    """End this thread, which takes its tasks from ``in_queue``, at exit if it still runs."""
    thread = current_thread()
    assert thread.ident is not None
    # Asked here, in the thread itself: asking for the clock of a thread that has ended may crash.
    clock = time.pthread_getcpuclockid(thread.ident) if hasattr(time, "pthread_getcpuclockid") else None
    _workers[thread] = in_queue, clock


def unwatch() -> None:
    """Forget this thread, which ends."""
    _workers.pop(current_thread(), None)


@atexit.register
def _send_all_away() -> None:
    for in_queue, _ in list(_workers.values()):
        with suppress(Empty):  # the end of the loop: asking whether it is empty first could miss a task
            while True:
                in_queue.get_nowait()
        in_queue.put(None)
    while _wait():
        pass


def _wait() -> bool:
    """Interrupt all workers and wait for them. Returns whether any that still runs has computed meanwhile."""
    clocks = {thread: clock for thread, (_, clock) in list(_workers.items()) if thread.is_alive()}
    before = {thread: _seconds(clock) for thread, clock in clocks.items()}
    for thread in clocks:
        # Raises SystemExit in the thread at its next line of Python.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    deadline = time.monotonic() + PATIENCE
    for thread in clocks:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread for thread in clocks if thread.is_alive()]
    return any(_seconds(clocks[thread]) - before[thread] > _COMPUTING for thread in left)


def _seconds(clock: int | None) -> float:
    """The processor time that a thread has taken; 0 where that is not known."""
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:  # the thread has just ended, and its clock with it
        return 0.0
