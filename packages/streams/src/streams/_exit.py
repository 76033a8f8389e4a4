"""The exit of the interpreter: workers that were not ended must neither delay it nor crash it.

During the shutdown, a thread that returns from a torch operation is killed in the middle of C++. That aborts the
process ("terminate called without an active exception") and hides its exit status. So workers are told to end before:
those that wait for a task end at once, those that compute one at their next line of Python.
"""

import atexit
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

PATIENCE = 2.0
"""Seconds for which the exit waits for workers. One that is blocked in a wait does no harm when it is killed."""

_workers: dict[Thread, SimpleQueue[Any]] = {}
"""For each worker the queue of its tasks.

Workers change this dict at any time; so it is copied in one operation before iteration. In a forked process the workers
of the parent are in it too, but ``is_alive`` is False for them.
"""


@contextmanager
def watched(in_queue: SimpleQueue[Any], ended: Event) -> Iterator[None]:
    """A context in which the exit ends this thread by its ``in_queue``; sets ``ended`` when it is left."""
    _workers[current_thread()] = in_queue
    try:
        yield
    finally:
        ended.set()
        _workers.pop(current_thread(), None)


@atexit.register
def _end_all() -> None:
    workers = [(thread, in_queue) for thread, in_queue in list(_workers.items()) if thread.is_alive()]
    for thread, in_queue in workers:
        with suppress(Empty):  # the end of the loop: asking whether it is empty first could miss a task
            while True:
                in_queue.get_nowait()
        in_queue.put(None)
        # Python has no public way to interrupt a thread. This raises SystemExit there, at its next line.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    deadline = time.monotonic() + PATIENCE
    for thread, _ in workers:
        thread.join(max(0.0, deadline - time.monotonic()))
