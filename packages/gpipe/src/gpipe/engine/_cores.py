"""The cores on which each worker on the CPU computes.

Workers wake each other often, and kernels then tend to run both on one core while another is idle. So each worker gets
a share of the cores of the process. Threads that a worker starts inherit its cores; a thread of a layer that should
compute elsewhere has to call ``os.sched_setaffinity``. Processes that a layer forks get all cores again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

Cores = frozenset[int]

_PIN = "GPIPE_PIN_WORKERS"
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


class _Bound(threading.local):
    """The cores that a process gets which this thread forks; any if empty."""

    of: Cores = frozenset()


_bound = _Bound()


def usable() -> Cores:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def shares(cores: Collection[int], workers: int) -> list[Cores]:
    """The cores of each worker: ``cores`` divided as evenly as possible, neighbours together.

    Every worker gets all of them where there is nothing to divide, or if ``GPIPE_PIN_WORKERS=0``.
    """
    if not _pins() or workers < 2 or len(cores) < workers:
        return [frozenset(cores)] * workers
    # Hyperthreads of a core, and then cores of a package, come next to each other, so that few of them are divided.
    near = sorted(cores, key=_position)
    ends = [len(near) * j // workers for j in range(workers + 1)]
    return [frozenset(near[begin:end]) for begin, end in pairwise(ends)]


def bind(cores: Cores, of: Cores = frozenset()) -> None:
    """Let the calling thread run on ``cores`` only, on any if empty; processes that it forks on ``of``."""
    _bound.of = of
    if cores:
        with suppress(OSError):  # not permitted here: only speed is lost
            os.sched_setaffinity(0, cores)


if hasattr(os, "register_at_fork"):
    # The child consists of the thread that forked. If that was a worker, it would stay on its share of the cores.
    os.register_at_fork(after_in_child=lambda: bind(_bound.of))


def _pins() -> bool:
    value = os.environ.get(_PIN, "1")
    if value not in ("0", "1"):
        # No guess: a misspelt value would silently measure the other behaviour.
        raise ValueError(f"{_PIN} must be 1, to give workers on the CPU cores of their own, or 0; got {value!r}")
    return value == "1"


@cache
def _position(core: int) -> tuple[int, int, int]:
    """A sort key by package and physical core: cores that share a cache go to the same worker."""
    return _read(core, "physical_package_id"), _read(core, "core_id"), core


def _read(core: int, what: str) -> int:
    try:
        return int(Path(_TOPOLOGY.format(core, what)).read_text())
    except (OSError, ValueError):
        return core
