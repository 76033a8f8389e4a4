"""Measurement: rounds in which programs take turns, and facts about the machine and this process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

import torch

Clock = Callable[[], float]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


class Step(NamedTuple):
    """A step in a separate process: its start and end, on the clock shared by all processes."""

    start: float
    end: float
    faults: int  # page faults of the process during the call


def interleaved(
    programs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    repeats: int = 1,
    warmups: int = 2,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call of each program in each round: the mean of `repeats` calls in a row."""
    return turns({name: partial(timed, program, repeats, clock) for name, program in programs.items()}, rounds, warmups)


def turns(programs: Mapping[Name, Callable[[], Result]], rounds: int, warmups: int = 0) -> dict[Name, list[Result]]:
    """Run all programs in turn, for `rounds` rounds after `warmups` untimed ones, and return the results by program."""
    results: dict[Name, list[Result]] = {name: [] for name in programs}
    for k in range(-warmups, rounds):
        for name, program in programs.items():
            result = program()
            if k >= 0:
                results[name].append(result)
    return results


def timed(program: Callable[[], object], repeats: int = 1, clock: Clock = time.perf_counter) -> float:
    start = clock()
    for _ in range(repeats):
        program()
    return (clock() - start) / repeats


def repeats_within(seconds: float, once: float, most: int = 1000) -> int:
    """Return how many calls of `once` seconds fill a turn of about `seconds`."""
    return max(1, min(most, round(seconds / max(once, 1e-9))))


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Return one ratio per round. Both times are from the same round, so a slow machine affects both."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: list[float], digits: int = 2, scale: float = 1.0) -> str:
    """The median, and in brackets the quartiles."""
    scaled = [value * scale for value in values]
    if len(scaled) < 2:
        return f"{scaled[0]:.{digits}f}"
    low, _, high = quantiles(scaled, n=4, method="inclusive")
    return f"{median(scaled):.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


DISTRIBUTIONS = ("torch", "torchgpipe", "fairscale", "transformers")
# Variables that change how threads wait or how memory is allocated: a figure measured with one of them says so.
VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "GPIPE_")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_STATUS = Path("/proc/self/status")


def stamp(arguments: list[str]) -> str:
    """One line that says where, when, with what, and how to measure again."""
    where = f"{processor()}, {_cores()} cores with {core_speed():.0f} GFLOP/s each, {platform.system()}"
    other = other_torch()
    session = "bench" if other is None else f"'bench-torch({other})'"
    command = " ".join(["python -m nox -s", session, "--", *arguments])
    return "; ".join([str(date.today()), where, _versions(), *_variables(), f"`{command}`"])


def other_torch() -> str | None:
    """The release of torch that is installed, if it is not the one of constraints.txt."""
    release = torch.__version__.partition("+")[0]
    return None if f"torch=={release}" in CONSTRAINTS.read_text(encoding="utf-8").split() else release


def processor() -> str:
    """The processor's own name, which `platform.processor()` does not know on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return name[1].strip() if name else platform.processor() or platform.machine()


def core_speed() -> float:
    """Return the GFLOP/s of a matrix product in float32 on one core.

    Virtual machines often have the same name for processors that differ by a factor of two.
    """
    threads, matrix = torch.get_num_threads(), torch.randn(512, 512)
    torch.set_num_threads(1)
    try:
        seconds = interleaved({"product": lambda: matrix @ matrix}, 20)["product"]
    finally:
        torch.set_num_threads(threads)
    return 2 * 512**3 / min(seconds) / 1e9


def allocator() -> str:
    """Return the default CPU allocator, e.g. `glibc 2.36 malloc`."""
    return " ".join(part for part in (*platform.libc_ver(), "malloc") if part)


def installed(distribution: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def bind_to_share(k: int, of: int) -> None:
    """Bind the calling thread and its children to the k-th share of the cores, as gpipe binds its workers."""
    from gpipe.engine._cores import bind, shares, usable

    bind(shares(usable(), of)[k])


def page_faults() -> int:
    """Return the number of page faults of this process so far (`ru_minflt`)."""
    import resource  # not on Windows, where the other functions work

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_memory() -> int | None:
    """Bytes of this process that are in memory, as Linux counts them; None elsewhere."""
    return _status("VmRSS")


def peak_memory() -> int | None:
    """The most bytes since the process began, or since `reset_peak`. Not `ru_maxrss`: a process inherits that."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Reset `peak_memory`."""
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")


def _status(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _cores() -> int:
    """Return the number of usable cores, which a container may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> str:
    found = [f"{name} {importlib.metadata.version(name)}" for name in DISTRIBUTIONS if installed(name)]
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _variables() -> list[str]:
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
