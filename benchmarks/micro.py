"""Microseconds per call of streams and microbatch, compared with Python's and torch's equivalents."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from statistics import median
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.overrides import BaseTorchFunctionMode

from microbatch import Batch, gather, scatter, scatter_views
from streams import Context, CPUStream, Task, limit_threads, spawn_workers

from .measure import interleaved, ratios, repeats_within, spread, timed
from .report import Report, Table

CPU = torch.device("cpu")
COLOUR: ContextVar[str] = ContextVar("COLOUR")


def of_workers(options: argparse.Namespace) -> Iterator[Report]:
    """Measure the cost of a worker and a context, and of the standard library's equivalents."""
    rounds, repeats = options.rounds or (3 if options.quick else 30), 50 if options.quick else 500
    caption = f"Microseconds a call, {rounds} rounds of {repeats} calls: medians, in brackets the quartiles"
    table = Table("streams.md", "workers", caption, ("what", "µs"))
    with ExitStack() as stack:
        programs = {**_worker_calls(stack), **_context_calls()}
        for name, times in interleaved(programs, rounds, repeats=repeats).items():
            table.add(name, spread(times, 1, scale=1e6))
    yield Report([table])


def _worker_calls(stack: ExitStack) -> dict[str, Callable[[], object]]:
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


def _context_calls() -> dict[str, Callable[[], object]]:
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


Call = Callable[[], object]


def of_batches(options: argparse.Namespace) -> Iterator[Report]:
    """Measure splitting and joining a mini-batch, compared with torch.chunk, torch.cat and torch's own splitter."""
    torch.set_num_threads(1)
    gc.freeze()  # else a full collection walks all of torch, in whichever call it happens to fall
    rounds = options.rounds or (3 if options.quick else 30)
    caption = (
        f"Microseconds of CPU time a call, and over that of the reference; {rounds} rounds: medians, in brackets the "
        "quartiles"
    )
    headings = ("call", "reference", "rows × columns, chunks", "µs", "over the reference's")
    table = Table("microbatch.md", "microbatch", caption, headings, left=3)
    _add_call(table, "Batch(x)", "x.detach()", "64 × 64", *_batch(), rounds)
    for rows, width, chunks in ((64, 64, 8), (256, 256, 32), (1024, 1024, 8)):
        x = torch.randn(rows, width)
        size = f"{rows} × {width}, {chunks}"
        for name, reference, ours, theirs in _cuts(x, chunks):
            _add_call(table, name, reference, size, ours, theirs, rounds)
    for name, value in _large().items():
        for chunks in (4, 16):
            _add_call(table, *_many_leaves(name, value, chunks), rounds)
    yield Report([table])


def _batch() -> tuple[Call, Call]:
    x = torch.randn(64, 64)
    return lambda: Batch(x), x.detach


def _cuts(x: Tensor, chunks: int) -> list[tuple[str, str, Call, Call]]:
    needy = x.clone().requires_grad_()
    batches, pieces = scatter(x, chunks), list(x.chunk(chunks))
    tree = {"a": x, "b": (x, x)}
    return [
        ("scatter(x)", "x.clone().chunk()", lambda: scatter(x, chunks), lambda: x.clone().chunk(chunks)),
        (
            "scatter(x), with grad",
            "x.clone().chunk()",
            lambda: scatter(needy, chunks),
            lambda: needy.clone().chunk(chunks),
        ),
        ("scatter_views(x)", "x.chunk()", lambda: scatter_views(x, chunks), lambda: x.chunk(chunks)),
        (
            "scatter_views(dict of three)",
            "three times x.chunk()",
            lambda: scatter_views(tree, chunks),
            lambda: [x.chunk(chunks) for _ in range(3)],
        ),
        ("gather(batches)", "torch.cat", lambda: gather(batches), lambda: torch.cat(pieces)),
    ]


def _large() -> dict[str, Any]:
    """Values of 2,000 leaves."""
    leaves = [torch.randn(16, 4) for _ in range(2000)]
    return {
        "tuple of 2,000": tuple(leaves),
        "dict of 2,000": {f"leaf {i}": leaf for i, leaf in enumerate(leaves)},
        "dict of 200 lists": {f"list {i}": leaves[i : i + 10] for i in range(0, 2000, 10)},
    }


def _many_leaves(name: str, value: Any, chunks: int) -> tuple[str, str, str, Call, Call]:
    return (
        f"scatter_views({name})",
        "split_args_kwargs_into_chunks",
        f"16 × 4, {chunks}",
        lambda: scatter_views(value, chunks),
        lambda: split_args_kwargs_into_chunks((value,), None, chunks),
    )


def _add_call(table: Table, name: str, reference: str, size: str, ours: Call, theirs: Call, rounds: int) -> None:
    repeats = repeats_within(0.005, median(timed(ours, clock=time.thread_time) for _ in range(5)), most=2000)
    # Thread CPU time, because the thread never waits and shares its core with other processes.
    times = interleaved({"ours": ours, "theirs": theirs}, rounds, repeats=repeats, clock=time.thread_time)
    over = spread(ratios(times["ours"], times["theirs"]))
    table.add(f"`{name}`", f"`{reference}`", size, spread(times["ours"], 1, scale=1e6), over)
