"""Let waiting workers free what they have made, where Python has no global lock.

Free-threaded Python counts the references of an object apart for the thread that made it (PEP 703). If another thread
drops the last one, it is the maker who frees the object, as soon as it runs Python again; and a worker that waits for
work does not. Without this, memory of a run would be kept until the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Event

from streams import InQueue, submit

FREE_THREADED = "free-threading build" in sys.version
"""Whether references are counted by thread. They are even where an extension module has switched the lock on again."""


class Sweep:
    """Wakes workers one after the other: from the last to the first, and back.

    What a worker frees may hold what its neighbours have made: values those of the stage before, gradients those of the
    stage after.

    Attributes:
        done: whether all have been awake.
    """

    def __init__(self, in_queues: Sequence[InQueue]) -> None:
        self._rest = [*in_queues[1:][::-1], *in_queues]
        self.done = Event()

    def __call__(self) -> None:
        """Called by each worker in turn, when it is awake."""
        if self._rest:
            submit(self._rest.pop(), self)
        else:
            self.done.set()
