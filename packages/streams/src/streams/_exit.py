"""The interpreter's exit: workers that nobody ended must neither hold it up nor make it crash.

A thread that comes out of a torch operation while the interpreter is being taken down is ended by force in the middle
of C++, which aborts the process ("terminate called without an active exception") and hides its exit status. So they are
asked to go before: those that wait for a task go at once, those that compute one at their next line of Python.
"""

from __future__ import annotations

import atexit
import ctypes
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

PATIENCE = 0.5
"""Seconds to wait for all of them together. One that is stuck in a wait of its own stays there, which is harmless."""

_workers: WeakKeyDictionary[Thread, SimpleQueue[Any]] = WeakKeyDictionary()


def watch(thread: Thread, in_queue: SimpleQueue[Any]) -> None:
    """Send ``thread``, which takes its tasks from ``in_queue``, away at exit if it is still there."""
    _workers[thread] = in_queue


@atexit.register
def _send_all_away() -> None:
    alive = {thread: queue for thread, queue in list(_workers.items()) if thread.is_alive()}
    for thread, queue in alive.items():
        _drop(queue)
        queue.put(None)
        _interrupt(thread)
    deadline = monotonic() + PATIENCE
    for thread in alive:
        thread.join(max(0.0, deadline - monotonic()))


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
