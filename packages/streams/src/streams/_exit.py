"""Interpreter shutdown: stop workers that are still running, without delaying or crashing the exit.

During shutdown, a thread that returns from a torch operation is killed in the middle of C++ code. This aborts the
process ("terminate called without an active exception") and hides its exit status. So workers are stopped earlier:
idle workers stop immediately, and busy workers at their next line of Python.
"""

import atexit
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty
from threading import current_thread
from typing import Any

from . import _waiting as waiting

PATIENCE = 2.0
"""The maximum seconds that the exit waits for workers. Killing a worker that is blocked in a wait is harmless."""

_workers: dict[waiting.Thread, waiting.SimpleQueue[Any]] = {}
"""The task queue of each worker.

Workers modify this dict at any time, so it is copied in one operation before iteration. A forked process also has the
parent's workers in it, but ``is_alive`` is False for them.
"""


@contextmanager
def watched(in_queue: waiting.SimpleQueue[Any], ended: waiting.Event) -> Iterator[None]:
    """Let the exit stop this thread through ``in_queue`` inside a ``with`` block; set ``ended`` at its end."""
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
        with suppress(Empty):  # drain until Empty, because checking empty() first could miss a task
            while True:
                in_queue.get_nowait()
        in_queue.put(None)
        # Python has no public API to interrupt a thread. This raises SystemExit in it, at its next line.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    deadline = time.monotonic() + PATIENCE
    for thread, _ in workers:
        thread.join(max(0.0, deadline - time.monotonic()))
