"""What a worker and a context cost, in microseconds, next to what the standard library has for it.

    python benchmarks/workers.py

All rows take turns within a round. A figure is the median over the rounds, in brackets the quartiles.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from statistics import median, quantiles
from threading import Thread

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode

from streams import Context, CPUStream, Task, limit_threads, spawn_workers

CPU = torch.device("cpu")
COLOUR: ContextVar[str] = ContextVar("COLOUR")


def main() -> None:
    options = _arguments()
    with ExitStack() as stack:
        programs = {**_workers(stack), **_contexts()}
        table = Table(title=f"{options.rounds} rounds of {options.repeats} calls; medians, in brackets the quartiles")
        table.add_column("what")
        table.add_column("µs a call", justify="right")
        for name, times in _interleaved(programs, options.rounds, options.repeats).items():
            table.add_row(name, _spread(times))
    console = Console(width=120)
    console.print(table)
    console.print(f"{_processor()}, torch {torch.__version__}, Python {platform.python_version()}")


def _workers(stack: ExitStack) -> dict[str, Callable[[], object]]:
    [in_queue], [out_queue] = stack.enter_context(spawn_workers([CPU]))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    task = Task(CPUStream, compute=_nothing)

    def round_trip() -> None:
        in_queue.put(task)
        out_queue.get()

    def new_thread() -> None:
        thread = Thread(target=_nothing)
        thread.start()
        thread.join()

    def four_workers() -> None:
        with spawn_workers([CPU] * 4, shared=False):
            pass

    return {
        "a task to a worker and its answer back": round_trip,
        "the same with concurrent.futures": lambda: pool.submit(_nothing).result(),
        "the same with a new thread": new_thread,
        "opening and closing four workers": four_workers,
        "limit_threads": lambda: limit_threads(torch.get_num_threads()),
    }


def _contexts() -> dict[str, Callable[[], object]]:
    usual = Context.capture()
    with torch.autocast("cpu"):
        autocast = Context.capture()
    with _everything():
        everything = Context.capture()
    return {
        "Context.capture()": Context.capture,
        "Context.capture() and applied(), nothing to change": lambda: _apply(Context.capture()),
        "applied(), nothing to change": lambda: _apply(usual),
        "applied(), autocast": lambda: _apply(autocast),
        "applied(), everything there is": lambda: _apply(everything),
    }


@contextmanager
def _everything() -> Iterator[None]:
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x)
    token = COLOUR.set("red")
    with torch.inference_mode(), torch.autocast("cpu"), hooks, torch.device("cpu"), BaseTorchFunctionMode():
        yield
    COLOUR.reset(token)


def _nothing() -> None:
    pass


def _apply(context: Context) -> None:
    with context.applied():
        pass


def _interleaved(programs: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(_microseconds(program, repeats))
    return times


def _microseconds(program: Callable[[], object], repeats: int) -> float:
    program()
    start = time.perf_counter()
    for _ in range(repeats):
        program()
    return (time.perf_counter() - start) / repeats * 1e6


def _spread(times: list[float]) -> str:
    low, _, high = quantiles(times, n=4)
    return f"{median(times):.1f} ({low:.1f} – {high:.1f})"


def _processor() -> str:
    return platform.processor() or platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
