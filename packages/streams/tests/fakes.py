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
"""Seconds after which something that should have happened counts as hanging."""


class FakeDevice:
    """A device of its own, different from every other."""

    type = "fake"
    index = None


def take(queue: SimpleQueue[Any]) -> Any:
    """The next thing in ``queue``; ``queue.Empty`` instead of a hang."""
    return queue.get(timeout=PATIENCE)


def wait(event: Event) -> None:
    """Return when ``event`` is set; fail instead of a hang."""
    assert event.wait(PATIENCE), "this never happened"


def started_from_now() -> Callable[[], set[Thread]]:
    """A function that tells which threads live that did not before; those of other tests may end meanwhile."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


def in_thread(call: Callable[[], T]) -> T:
    """What ``call`` gives, or raises, on a fresh thread."""
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


def in_child(call: Callable[[], object]) -> str:
    """``repr`` of what ``call`` gives, or raises, in a fork of this process; one that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may have a time limit of its own
            signal.alarm(int(PATIENCE))
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
    """What a Python of its own says that runs ``program`` and can import what this one can."""
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)


def submit(in_queue, call):
    """A future of what ``call`` gives on the worker of ``in_queue``."""
    future = Future()
    in_queue.put(Task(CPUStream, compute=lambda: settle(future, call)))
    return future
