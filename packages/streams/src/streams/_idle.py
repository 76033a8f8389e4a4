"""The helper threads of parallel operations, which stay after an operation."""

from __future__ import annotations

import os
import threading

from ._libraries import native

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: thread-local data is kept


def pause_helpers() -> bool:
    """End the helper threads that intra-op parallelism has started for this thread.

    After a parallel operation OpenMP's helpers spin for some milliseconds, in case the next operation follows soon.
    That takes cores away from other threads that are about to compute. The next parallel operation of this thread
    starts its helpers again, which takes tens of microseconds for each. Helpers of other threads are not affected. Does
    nothing inside a parallel region, if torch uses another library than OpenMP, and in a forked process.

    Returns:
        True if OpenMP has a function for this, and it was called.
    """
    if threading.get_ident() == _left_by_a_fork:
        return False  # its helpers are not in the forked process, and OpenMP would wait for them
    pause = native("omp_pause_resource_all")
    return pause is not None and pause(_SOFT) == 0


_left_by_a_fork: int | None = None


def _after_fork() -> None:
    global _left_by_a_fork
    _left_by_a_fork = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
