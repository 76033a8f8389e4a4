"""microbatch: what a mini-batch costs to cut and to join, beside torch.chunk, torch.cat and torch's own splitter."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from microbatch import Batch, gather, scatter, scatter_views

from .report import Report, Table
from .timing import interleaved, ratios, repeats_within, spread, timed

Call = Callable[[], object]


def run(options: argparse.Namespace) -> Iterator[Report]:
    torch.set_num_threads(1)
    gc.freeze()  # else a full collection walks all of torch, in whichever call it happens to fall
    rounds = options.rounds or (3 if options.quick else 30)
    caption = (
        f"Microseconds of CPU time a call, and over that of the reference; {rounds} rounds: medians, in brackets the "
        "quartiles"
    )
    headings = ("call", "reference", "rows × columns, chunks", "µs", "over the reference's")
    table = Table("microbatch.md", "microbatch", caption, headings, left=3)
    _add(table, "Batch(x)", "x.detach()", "64 × 64", *_batches(), rounds)
    for rows, width, chunks in ((64, 64, 8), (256, 256, 32), (1024, 1024, 8)):
        x = torch.randn(rows, width)
        size = f"{rows} × {width}, {chunks}"
        for name, reference, ours, theirs in _cuts(x, chunks):
            _add(table, name, reference, size, ours, theirs, rounds)
    for name, value in _large().items():
        for chunks in (4, 16):
            _add(table, *_many_leaves(name, value, chunks), rounds)
    yield Report([table])


def _batches() -> tuple[Call, Call]:
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


def _add(table: Table, name: str, reference: str, size: str, ours: Call, theirs: Call, rounds: int) -> None:
    repeats = repeats_within(0.005, median(timed(ours, clock=time.thread_time) for _ in range(5)), most=2000)
    # The time of this thread: it waits for nobody, and shares its core with others.
    times = interleaved({"ours": ours, "theirs": theirs}, rounds, repeats=repeats, clock=time.thread_time)
    over = spread(ratios(times["ours"], times["theirs"]))
    table.add(f"`{name}`", f"`{reference}`", size, spread(times["ours"], 1, scale=1e6), over)
