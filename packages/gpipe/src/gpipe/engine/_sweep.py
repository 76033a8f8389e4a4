"""Have waiting workers free what they allocated, on a Python without a global interpreter lock.

Free-threaded Python counts the references of an object separately for the thread that made it (PEP 703). If another
thread drops the last reference, the thread that made the object frees it, when it next runs Python. A waiting worker
does not run. Without this, the memory of a run would be kept until the next run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Event

from streams import InQueue, submit

FREE_THREADED = "free-threading build" in sys.version
"""Whether references are counted by thread: also if an extension module has switched the lock on again."""


class Sweep:
    """Wakes workers one after the other: from the last to the first, and back.

    What a worker frees may refer to objects that its neighbours made: values to those of the stage before, gradients to
    those of the stage after.

    Attributes:
        done: whether all workers have been woken.
    """

    def __init__(self, in_queues: Sequence[InQueue]) -> None:
        self._rest = [*in_queues[1:][::-1], *in_queues]
        self.done = Event()

    def __call__(self) -> None:
        """Called by each worker in turn, when it runs."""
        if self._rest:
            submit(self._rest.pop(), self)
        else:
            self.done.set()
