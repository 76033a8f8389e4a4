"""Which cores each worker on the CPU computes on.

Workers wake each other all the time, and some kernels take that as a reason to run both on one core while another
idles. So each gets a share of the cores that the process may use: a set, within which the kernel may choose.

Threads that a worker starts have its cores, as the system will have it, which is right for the helpers of operations. A
thread of a layer's own that is to compute elsewhere has to say so (``os.sched_setaffinity``). Processes that a layer
forks, such as those of a data loader, have all cores again.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

from .._current import current

Cores = frozenset[int]

_PIN = "GPIPE_PIN_WORKERS"
_PAUSE = "GPIPE_PAUSE_HELPERS"
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def usable() -> Cores:
    """The cores that the calling thread may use; none where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def shares(cores: Collection[int], workers: int) -> list[Cores]:
    """The cores of each worker: ``cores`` divided as evenly as can be, with neighbours together.

    All of them for everybody where there is nothing to divide, and where ``GPIPE_PIN_WORKERS=0`` forbids it.
    """
    if not _switched_on(_PIN, "to give workers on the CPU cores of their own") or workers < 2 or len(cores) < workers:
        return [frozenset(cores)] * workers
    near = sorted(cores, key=_position)
    ends = [len(near) * j // workers for j in range(workers + 1)]
    return [frozenset(near[begin:end]) for begin, end in pairwise(ends)]


def bind(cores: Cores, of: Cores = frozenset()) -> None:
    """Let the calling thread, and the threads that it starts, run on ``cores`` only; if none are known, anywhere.

    Processes that it forks run on the cores ``of`` which these are a share.
    """
    current.cores = of
    if cores:
        with suppress(OSError):  # forbidden here: nothing is lost but time
            os.sched_setaffinity(0, cores)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: bind(current.cores))


def pauses_callers_helpers() -> bool:
    """Whether the caller's intra-op helper threads end before workers on the CPU start; not with GPIPE_PAUSE_HELPERS=0.

    Raises ValueError if the variable is neither 0 nor 1.
    """
    return _switched_on(_PAUSE, "to end the caller's helper threads before a run")


def _switched_on(variable: str, purpose: str) -> bool:
    value = os.environ.get(variable, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 1, {purpose}, or 0; got {value!r}")
    return value == "1"


@cache
def _position(core: int) -> tuple[int, int, int]:
    """Equal packages and then equal physical cores stand together, as what they share is of use to one worker."""
    return _read(core, "physical_package_id"), _read(core, "core_id"), core


def _read(core: int, what: str) -> int:
    try:
        return int(Path(_TOPOLOGY.format(core, what)).read_text())
    except (OSError, ValueError):
        return core
