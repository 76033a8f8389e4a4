"""Pin each CPU worker to its own share of the cores.

Workers wake each other often, and kernels then tend to run both on one core while another core is idle. So each worker
gets a share of the process's cores. Threads started by a worker inherit its cores. If a layer's thread should use
different ones, it has to call ``os.sched_setaffinity``. Processes forked by a layer get all cores again.
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
    """The cores for a process that this thread forks; all cores if empty."""

    of: Cores = frozenset()


_bound = _Bound()


def usable() -> Cores:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def shares(cores: Collection[int], workers: int) -> list[Cores]:
    """Return the cores of each worker: ``cores`` divided as evenly as possible, neighbors together.

    Every worker gets all cores if there are too few to divide, or if ``GPIPE_PIN_WORKERS=0``.
    """
    if not _pins() or workers < 2 or len(cores) < workers:
        return [frozenset(cores)] * workers
    # Hyperthreads of a core are adjacent, then cores of a package, so that few of them are divided.
    near = sorted(cores, key=_position)
    ends = [len(near) * j // workers for j in range(workers + 1)]
    return [frozenset(near[begin:end]) for begin, end in pairwise(ends)]


def bind(cores: Cores, of: Cores = frozenset()) -> None:
    """Restrict the calling thread to ``cores``, and processes that it forks to ``of``; empty means no restriction."""
    _bound.of = of
    if cores:
        with suppress(OSError):  # not permitted here: only slower
            os.sched_setaffinity(0, cores)


if hasattr(os, "register_at_fork"):
    # The child has only the thread that forked. A worker would otherwise stay on its share of the cores.
    os.register_at_fork(after_in_child=lambda: bind(_bound.of))


def _pins() -> bool:
    value = os.environ.get(_PIN, "1")
    if value not in ("0", "1"):
        # Strict, because a misspelled value would silently select the wrong behavior.
        raise ValueError(f"{_PIN} must be 1, to give workers on the CPU cores of their own, or 0; got {value!r}")
    return value == "1"


@cache
def _position(core: int) -> tuple[int, int, int]:
    """Return a sort key by package and physical core, so that one worker gets cores that share a cache."""
    return _read(core, "physical_package_id"), _read(core, "core_id"), core


def _read(core: int, what: str) -> int:
    try:
        return int(Path(_TOPOLOGY.format(core, what)).read_text())
    except (OSError, ValueError):
        return core
