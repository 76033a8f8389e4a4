"""The helper threads that parallel operations leave behind."""

from __future__ import annotations

import os
import threading

from ._libraries import native

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: what threads have of their own survives


def pause_helpers() -> bool:
    """End the helper threads that intra-op parallelism has started for this thread.

    After a parallel operation OpenMP's helpers do not sleep at once: they spin for some milliseconds, in case the next
    operation comes soon. If other threads of the process are about to compute, that takes cores away from them. The
    next parallel operation of this thread starts its helpers anew, which takes tens of microseconds for each. Other
    threads' helpers are left alone. Does nothing inside a parallel region, where torch uses another library, and on
    the thread that is left in a forked process.

    Returns:
        True if OpenMP has a function for it, and it was called.
    """
    if threading.get_ident() == _left_by_a_fork:
        return False  # its helpers stayed in the parent, and OpenMP would wait for them
    pause = native("omp_pause_resource_all")
    return pause is not None and pause(_SOFT) == 0


_left_by_a_fork: int | None = None


def _after_fork() -> None:
    global _left_by_a_fork
    _left_by_a_fork = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
