"""Stand-ins, and waits with a limit that only a hang reaches."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from streams import CPUStream, Task

T = TypeVar("T")

PATIENCE = 300.0
"""Timeout in seconds: a missing event counts as a hang."""


class FakeDevice:
    """A device that differs from every other device."""

    type = "fake"
    index = None


def take(queue: SimpleQueue[Any]) -> Any:
    """The next thing in ``queue``; ``queue.Empty`` instead of a hang."""
    return queue.get(timeout=PATIENCE)


def wait(event: Event) -> None:
    """Return when ``event`` is set; fail instead of a hang."""
    assert event.wait(PATIENCE), "this never happened"


def started_from_now() -> Callable[[], set[Thread]]:
    """Return a function that returns the threads started since now; threads of other tests may end in between."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


def in_thread(call: Callable[[], T]) -> T:
    """Return the result of ``call``, or raise its exception, on a fresh thread."""
    future: Future[T] = Future()
    thread = Thread(target=settle, args=(future, call), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return future.result(timeout=0)


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Give ``future`` what ``call`` gives, or raises."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def end_after(seconds: float) -> None:
    """Let a signal end this process after some seconds, unless it has ended by then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent may have its own time limit
    signal.alarm(int(seconds))


def in_child(call: Callable[[], object]) -> str:
    """Return ``repr`` of the result or exception of ``call`` in a fork of this process; a hanging fork is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            end_after(PATIENCE)
            try:
                answer = repr(call())
            except BaseException as error:
                answer = repr(error)
            os.write(writer, answer.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = told.read()
    os.waitpid(child, 0)
    return answer or "no answer: the child hung, or died"


def in_fresh_process(program: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new Python process that can import everything this one can."""
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)


def submit(in_queue, call):
    """Run ``call`` on the worker of ``in_queue``, and return a future of its result."""
    future = Future()
    in_queue.put(Task(CPUStream, compute=lambda: settle(future, call)))
    return future
