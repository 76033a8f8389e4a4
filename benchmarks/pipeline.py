"""How close the pipeline comes to its own limit, and to torchgpipe: ratios of interleaved runs.

    python benchmarks/pipeline.py --width 1024 256 64

Workload W: 8 × (Linear(D, D) + GELU) on a batch of D rows that requires grad, two partitions on two CPU stages, forward
and backward, one intra-op thread a worker. The programs take turns: the plain loop over the micro-batches, GPipe,
torchgpipe 0.0.7 where it is installed, and two unlinked plain loops in two threads, which tell how much of two cores
the machine gives at the time. With --pin these two and GPipe's workers are bound to cores of their own: some kernels
put threads that wake each other on one core, and then nobody gains anything.

The speed-up of a pipeline of n stages on m micro-batches is at most m·n/(m+n−1), if nothing is recomputed and backwards
are whole. Efficiency is the measured speed-up over that limit, over half of the machine's own two-thread scaling.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from gpipe import GPipe
from streams import limit_threads

try:
    import torchgpipe
except ImportError:
    torchgpipe = None

STAGES = 2
CHECKPOINTS = ("never", "except_last", "always")
SCHEDULES = ("fill_drain", "1f1b", "zero_bubble")
HEADINGS = ("D=B", "way", "loop, ms", "speed-up", "two threads", "efficiency", "time / torchgpipe's")

Programs = dict[str, Callable[[], None]]


def main() -> None:
    options = _arguments()
    _start_again(OMP_NUM_THREADS="1", GPIPE_PIN_WORKERS=str(int(options.pin)))
    table = Table(title=f"W, m={options.chunks}, {options.rounds} rounds: medians, in brackets the quartiles")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for width in options.width:
        for way in options.way:
            table.add_row(str(width), way, *_row(_programs(width, options.chunks, way, options.pin), way, options))
    console = Console(width=120)
    console.print(table)
    console.print(f"{_processor()}, torch {torch.__version__}, Python {platform.python_version()}")


def _row(programs: Programs, way: str, options: argparse.Namespace) -> list[str]:
    times = _interleaved(programs, options.rounds)
    speedup = _ratios(times["loop"], times["gpipe"])
    scaling = [2 * ratio for ratio in _ratios(times["loop"], times["two threads"])]
    limit = options.chunks * STAGES / (options.chunks + STAGES - 1)
    efficiency = median(speedup) / limit / (median(scaling) / 2)
    return [
        f"{median(times['loop']) * 1e3:.2f}",
        _spread(speedup),
        _spread(scaling),
        "–" if way in ("except_last", "always") else f"{efficiency:.2f}",
        _spread(_ratios(times["gpipe"], times["torchgpipe"])) if "torchgpipe" in times else "–",
    ]


def _programs(width: int, chunks: int, way: str, pin: bool) -> Programs:
    batch = torch.randn(width, width)
    plain, twin = _model(width), _model(width)
    cores = iter(sorted(os.sched_getaffinity(0)))
    threads = ThreadPoolExecutor(2, initializer=_settle, initargs=(cores, pin))  # kept, as the pipe's own are
    checkpoint = way if way in CHECKPOINTS else "never"
    how = {"devices": ["cpu"] * STAGES, "chunks": chunks, "checkpoint": checkpoint}
    pipe = GPipe(_model(width), [8, 8], **how)
    programs = {
        "loop": lambda: _loop(plain, batch, chunks),
        "gpipe": (lambda: _forward_and_backward(pipe, batch))
        if way in CHECKPOINTS
        else lambda: _step(pipe, batch, way),
        "two threads": lambda: _together(
            threads, lambda: _loop(plain, batch, chunks), lambda: _loop(twin, batch, chunks)
        ),
    }
    if torchgpipe is not None:
        peer = torchgpipe.GPipe(_model(width), [8, 8], **how)
        programs["torchgpipe"] = lambda: _forward_and_backward(peer, batch)
    return programs


def _start_again(**variables: str) -> None:
    """With these variables, in time for every thread that there will be: torchgpipe's are new in every run."""
    if not variables.items() <= os.environ.items():
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def _settle(cores: Iterator[int], pin: bool) -> None:
    limit_threads(1)
    if pin:
        os.sched_setaffinity(0, {next(cores)})


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())])


def _forward_and_backward(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch.detach().requires_grad_()).sum().backward()


def _step(pipe: GPipe, batch: torch.Tensor, schedule: str) -> None:
    pipe.zero_grad()
    pipe.step(
        batch.detach().requires_grad_(), loss_fn=lambda output, _: output.sum(), reduction="sum", schedule=schedule
    )


def _loop(model: nn.Module, batch: torch.Tensor, chunks: int) -> None:
    model.zero_grad()
    for chunk in batch.detach().requires_grad_().chunk(chunks):
        model(chunk).sum().backward()


def _together(threads: ThreadPoolExecutor, *works: Callable[[], None]) -> None:
    for future in [threads.submit(work) for work in works]:
        future.result()


def _interleaved(programs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    for program in programs.values():
        program()
        program()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in track(range(rounds), transient=True):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    return times


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _spread(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.2f} [{low:.2f}–{high:.2f}]"


def _processor() -> str:
    return platform.processor() or platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[1024, 256, 64])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument(
        "--way",
        nargs="+",
        choices=CHECKPOINTS + SCHEDULES,
        default=["never", "always", "1f1b", "zero_bubble"],
        help="forward and backward with this checkpointing, or step() with this schedule",
    )
    parser.add_argument(
        "--pin", action="store_true", help="bind our workers, and the two threads, to cores of their own"
    )
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
