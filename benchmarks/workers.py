"""What a worker and a context cost, in microseconds, next to what the standard library has for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Thread

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode

from streams import Context, CPUStream, Task, limit_threads, spawn_workers

from .report import Report, Table
from .timing import interleaved, spread

CPU = torch.device("cpu")
COLOUR: ContextVar[str] = ContextVar("COLOUR")


def run(options: argparse.Namespace) -> Iterator[Report]:
    rounds, repeats = options.rounds or (3 if options.quick else 30), 50 if options.quick else 500
    caption = f"Microseconds a call, {rounds} rounds of {repeats} calls: medians, in brackets the quartiles"
    table = Table("streams.md", "workers", caption, ("what", "µs"))
    with ExitStack() as stack:
        programs = {**_workers(stack), **_contexts()}
        for name, times in interleaved(programs, rounds, repeats=repeats).items():
            table.add(name, spread(times, 1, scale=1e6))
    yield Report([table])


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
