"""Create, close and drop pipes whose steps succeed, fail or are interrupted, and check that nothing accumulates.

    python -m packages.gpipe.tests.interleavings.soak [--steps 20000]

Real signals interrupt real waits: a timer sends SIGALRM, whose handler raises KeyboardInterrupt. The time of a step is
compared with the median of its kind: the same schedule, chunks, checkpointing and model. The first step of a kind in
each pipe is apart, because it also learns what the layers do.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gpipe import GPipe

from ..layers import Layer, Row, linear, rows, trained
from ..soaking import run
from .scenarios import model_of

SCHEDULES = (None, "fill_drain", "1f1b", "zero_bubble")
MODES = ("never", "except_last", "always")
Kind = tuple[str | None, int, str, bool]
"""The schedule, the number of micro-batches, the checkpointing mode, and whether a model's own forward runs."""


def new_pipe(rng: random.Random) -> tuple[GPipe, bool]:
    """Return a pipe, and whether a model's own forward runs in it."""
    create = model_of(linear, lambda: Layer(may_fail), linear, lambda: Layer(may_fail))
    mode, chunks = rng.choice(MODES), rng.randint(1, 4)
    if rng.random() < 0.3:
        names = [f"layers.{k}" for k in range(4)]
        return GPipe(Row(*create()), [2, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode, blocks=names), True
    return GPipe(create(), [2, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode), False


fails = [False]


def may_fail(_: Any, x: torch.Tensor) -> torch.Tensor:
    if fails[0]:
        raise ValueError("a layer fails")
    return x * 1


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def step(pipe: GPipe, rng: random.Random, schedule: str | None) -> str:
    """Run one step, and return its kind: right, fails, or interrupted."""
    kind = rng.choice(("right", "right", "fails", "interrupted"))
    fails[0] = kind == "fails"
    try:
        with suppress(KeyboardInterrupt), interrupted_after(rng.uniform(0.0001, 0.02) if kind == "interrupted" else 0):
            trained(pipe, rows(rng.randint(4, 8)), schedule)
    except ValueError as error:
        if kind != "fails":
            raise
        error.__traceback__ = None
    finally:
        fails[0] = False
    return kind


def counts() -> tuple[int, int, float]:
    """Return the number of threads, the number of open files, and the peak memory in MiB."""
    gc.collect()
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def soak(steps: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    pipe, is_model = new_pipe(rng)
    known, times, firsts = set[Kind](), dict[Kind, list[float]](), list[float]()
    ends, seen = dict[str, int](), list[tuple[int, int, float]]()
    gc.collect()
    gc.freeze()  # a full collection of what torch has imported takes 0.2 s, and would be the slowest step
    try:
        for number in range(steps):
            begin = time.perf_counter()
            schedule = rng.choice(SCHEDULES)
            end = step(pipe, rng, schedule)
            ends[end] = ends.get(end, 0) + 1
            if end == "right":
                kind = schedule, pipe.chunks, pipe.checkpoint, is_model
                (times.setdefault(kind, []) if kind in known else firsts).append(time.perf_counter() - begin)
                known.add(kind)
            pipe.zero_grad()
            if rng.random() < 0.02:
                if rng.random() < 0.5:
                    pipe.close()
                pipe, is_model = new_pipe(rng)
                known.clear()
            if number % max(1, steps // 10) == 0:
                seen.append(counts())
                print(f"{number:>7} steps: %d threads, %d files, at most %.0f MiB" % seen[-1], flush=True)
    finally:
        signal.signal(signal.SIGALRM, before)
        pipe.close()
        gc.unfreeze()
    seen.append(counts())
    print(f"{steps} steps: {ends}; in the end %d threads, %d files, at most %.0f MiB" % seen[-1])
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    ratios = sorted(each / medians[kind] for kind in times for each in times[kind])
    least, most = (1e3 * each for each in (min(medians.values()), max(medians.values())))
    print(f"the median of a kind is {least:.1f} to {most:.1f} ms, a first step at most {1e3 * max(firsts):.1f} ms,")
    print(f"the slowest steps {', '.join(f'{each:.1f}' for each in ratios[-3:])} times the median of their kind")
    assert seen[-1][0] <= seen[0][0], "threads are left"
    assert seen[-1][1] <= seen[0][1] + 2, "files are left open"


def main(arguments: Sequence[str] | None = None) -> int:
    return run(soak, 20_000, arguments)


if __name__ == "__main__":
    sys.exit(main())
