"""Engine overhead: microseconds per cell (a micro-batch on a stage) of stages that do nothing; and time to import."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

import gpipe

from .contenders import LOOP, Contender, can_run
from .measure import ratios, spread, turns
from .report import Report, Table

PAGE = "engine.md"
STAGES, MICROBATCHES = (2, 4, 8, 16, 32, 64), (1, 4, 16, 64, 256)
FEW = ((2, 4), (4, 64))
Times = tuple[float, float]  # seconds of a forward and of its backward


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Cells, imports, and the first step."""
    yield _cells(options)
    yield _import(options)
    yield _first(options)


def _cells(options: argparse.Namespace) -> Report:
    rounds = options.rounds or (3 if options.quick else 15)
    headings = (
        "stages",
        "micro-batches",
        "loop",
        "workers",
        "workers / loop",
        "forward",
        "backward",
        "checkpointed",
        "inline",
    )
    table = Table(PAGE, "engine", f"Microseconds a cell, {rounds} rounds: medians, in brackets the quartiles", headings)
    figures: dict[str, float] = {}
    for n, m in FEW if options.quick else product(STAGES, MICROBATCHES):
        times = turns(_ways(n, m), rounds, warmups=3)
        cell = 1e6 / (n * m)
        both = {name: [sum(pair) for pair in pairs] for name, pairs in times.items()}
        forward, backward = zip(*times["workers"], strict=True)
        over = ratios(both["workers"], both["loop"])
        ways = [list(forward), list(backward), both["checkpointed"], both["inline"]]
        loop, workers, *others = (spread(values, 1, scale=cell) for values in (both["loop"], both["workers"], *ways))
        table.add(n, m, loop, workers, spread(over), *others)
        figures[f"engine {n}x{m}: workers / loop"] = median(over)
        figures[f"engine {n}x{m}: inline / loop"] = median(ratios(both["inline"], both["loop"]))
    return Report([table], figures)


def _ways(stages: int, microbatches: int) -> dict[str, Callable[[], Times]]:
    loop, one = Loop(stages, microbatches), torch.ones(1, 1)
    rows, ones = one_row_each(microbatches), torch.ones(microbatches, 1)
    plain = empty_pipe(stages, microbatches)
    checkpointed = empty_pipe(stages, microbatches, "always")

    def looped() -> Times:
        return _both(loop.forward, lambda outputs: [output.backward(one) for output in outputs])

    def piped(pipe: gpipe.GPipe) -> Times:
        return _both(lambda: pipe(rows), lambda output: output.backward(ones))

    def inline() -> Times:
        with gpipe.inline():
            return piped(plain)

    return {
        "loop": looped,
        "workers": lambda: piped(plain),
        "checkpointed": lambda: piped(checkpointed),
        "inline": inline,
    }


def empty_pipe(stages: int, microbatches: int, checkpoint: str = "never") -> gpipe.GPipe:
    """A pipe whose stages do nothing."""
    layers = nn.Sequential(*(nn.Identity() for _ in range(stages)))
    return gpipe.GPipe(layers, [1] * stages, devices=["cpu"] * stages, chunks=microbatches, checkpoint=checkpoint)


def one_row_each(microbatches: int) -> Tensor:
    """Return a mini-batch with one row per micro-batch."""
    return torch.ones(microbatches, 1, requires_grad=True)


class Loop:
    """Run one multiplication per cell, sequentially."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self._stages, self._rows = stages, one_row_each(microbatches).detach().chunk(microbatches)

    def forward(self) -> list[Tensor]:
        return [self._through(row) for row in self._rows]

    def _through(self, row: Tensor) -> Tensor:
        y = row.detach().requires_grad_()
        for _ in range(self._stages):
            y = y * 1
        return y


def _both(forward: Callable[[], Tensor | list[Tensor]], backward: Callable[..., object]) -> Times:
    start = time.perf_counter()
    output = forward()
    middle = time.perf_counter()
    backward(output)
    return middle - start, time.perf_counter() - middle


_IMPORT = "import time, torch; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def _import(options: argparse.Namespace) -> Report:
    """Fresh interpreters, which take turns."""
    rounds = options.rounds or (2 if options.quick else 10)
    packages = ("gpipe", "profiler", "microbatch", "streams", "blockpartition")
    caption = f"Milliseconds to import, after `import torch`; {rounds} rounds: medians, in brackets the quartiles"
    table = Table(PAGE, "import", caption, ("package", "ms"))
    with TemporaryDirectory() as folder:
        imports = {name: partial(_numbers, ["-c", _IMPORT.format(name)], folder) for name in packages}
        found = turns(imports, rounds, warmups=1)  # the first time modules are compiled
    times = {name: [seconds for (seconds,) in each] for name, each in found.items()}
    for name, own in times.items():
        table.add(f"`{name}`", spread(own, 1, scale=1e3))
    return Report([table], {"import: gpipe, ms": median(times["gpipe"]) * 1e3})


def _first(options: argparse.Namespace) -> Report:
    """Measure one-time costs of a first step, such as importing parts of torch, in fresh interpreters."""
    rounds = options.rounds or (1 if options.quick else 5)
    field = [
        Contender(library, mode) for library in ("gpipe", "torchgpipe", "fairscale") for mode in ("never", "always")
    ]
    caption = f"Milliseconds of the first two steps of W, D=B=64; {rounds} rounds: medians, in brackets the quartiles"
    table = Table(PAGE, "first-step", caption, ("library", "schedule", "checkpoint", "first", "next"), left=3)
    with TemporaryDirectory() as folder:
        steps = {
            one: partial(_numbers, ["-m", "benchmarks.programs", one.library, one.checkpoint], folder)
            for one in (LOOP, *field)
            if can_run(one)
        }
        times = turns(steps, rounds, warmups=1)
    for contender, pairs in times.items():
        first, following = zip(*pairs, strict=True)
        table.add(*contender.columns, spread(list(first), 0), spread(list(following), 1))
    ours = times[Contender("gpipe")]
    return Report([table], {"first step: gpipe, ms": median(first for first, _ in ours)})


def _numbers(arguments: list[str], folder: str) -> list[float]:
    """The numbers a fresh interpreter prints; it keeps compiled modules in `folder`, whatever the caller's does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "PYTHONPYCACHEPREFIX": folder},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [float(word) for word in done.stdout.split()]
