"""Many lists at once, without the garbage collector looking at all of them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected inside, in the whole process: collections take most of the time of a million lists.

    Every so many new lists Python looks for cycles among all objects there are, and finds none: what is made inside is
    made of what the caller holds.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
