"""What the engine costs: microseconds a cell, forward and backward, on stages that do nothing.

    python benchmarks/engine.py --sizes 4x64 64x64

Beside it a plain loop of as many multiplications on one thread. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gpipe import GPipe, inline


def main() -> None:
    options = _arguments()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    table = Table(title=f"Microseconds a cell, {options.rounds} rounds: medians, in brackets the fastest")
    for heading in ("stages × micro-batches", "checkpoint", "plain loop", "on workers", "inline"):
        table.add_column(heading, justify="right")
    for size in options.sizes:
        stages, microbatches = map(int, size.split("x"))
        times = _times(_programs(stages, microbatches, options.checkpoint), options.rounds)
        cells = (f"{median(t) / stages / microbatches:.1f} [{min(t) / stages / microbatches:.1f}]" for t in times)
        table.add_row(f"{stages} × {microbatches}", options.checkpoint, *cells)
    Console(width=100).print(table)


def _programs(stages: int, microbatches: int, checkpoint: str) -> list[Callable[[], None]]:
    rows = torch.ones(microbatches, 1, requires_grad=True)
    empty = nn.Sequential(*(nn.Identity() for _ in range(stages)))
    pipe = GPipe(empty, [1] * stages, devices=["cpu"] * stages, chunks=microbatches, checkpoint=checkpoint)

    def loop() -> None:
        for row in rows.chunk(microbatches):
            y = row.detach().requires_grad_()
            for _ in range(stages):
                y = y * 1
            y.backward(torch.ones(1, 1))

    def on_workers() -> None:
        pipe(rows).backward(torch.ones(microbatches, 1))

    def on_this_thread() -> None:
        with inline():
            on_workers()

    return [loop, on_workers, on_this_thread]


def _times(programs: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Microseconds of each program, in turns, after a few rounds to get warm."""
    times: list[list[float]] = [[] for _ in programs]
    for k in range(rounds + 5):
        for program, own in zip(programs, times, strict=True):
            start = time.perf_counter()
            program()
            if k >= 5:
                own.append((time.perf_counter() - start) * 1e6)
    return times


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["4x64", "64x64"], help="stages x micro-batches")
    parser.add_argument("--checkpoint", choices=["never", "always"], default="never")
    parser.add_argument("--rounds", type=int, default=35)
    return parser.parse_args()


if __name__ == "__main__":
    main()
