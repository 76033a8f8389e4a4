"""Make many lists without the garbage collector traversing all of them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A context in which nothing is collected, in the whole process: for a million lists, collections take most of the
    time.

    After a number of new lists Python looks for cycles among all objects. There are none: the new lists contain only
    objects of the caller.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
