"""Tell whether a framework really computes in a pipe: which thread calls each block, how often, with how many rows.

Losses alone are not enough. A framework that bypasses the pipe gets the same numbers, but each block then runs once, on
the full batch, on the framework's own thread.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe import GPipe, record
from microbatch import flatten

FORWARDS, WORKERS = "gpipe forward", "worker of"
"""Prefixes of thread names: forwards of a model, and stages."""


class Called(NamedTuple):
    """A call of a block.

    Attributes:
        thread: the name of the thread that computes it.
        rows: the number of rows of its first tensor.
        generates: whether it is part of ``pipe.generate()``, in which stages take turns on the full batch.
    """

    block: int
    thread: str
    rows: int
    generates: bool


@contextmanager
def pipelined(pipe: nn.Module, rows: int, *, microbatches: int = 2, each: int = 1) -> Iterator[list[Called]]:
    """Expect that everything inside the context computes in ``pipe``: in its threads, once per micro-batch.

    Args:
        rows: the number of rows of the largest micro-batch.
        microbatches: the least number of micro-batches of the largest mini-batch.
        each: how often the model calls a block in one forward.
    """
    assert isinstance(pipe, GPipe)
    calls: list[Called] = []
    with ExitStack() as scope:
        timeline = scope.enter_context(record())
        for k, block in enumerate(pipe):
            scope.callback(block.register_forward_pre_hook(_noting(calls, k), with_kwargs=True).remove)
        yield calls
    forwards = Counter(event.stage for event in timeline.events if event.kind == "forward")
    again = Counter(event.stage for event in timeline.events if event.kind == "recompute")
    _expect_in_threads(calls)
    assert timeline.microbatches >= microbatches, f"{timeline.microbatches} micro-batches"
    is_model = hasattr(pipe, "block_names")
    first = Counter(call.block for call in calls if call.thread.startswith(FORWARDS if is_model else WORKERS))
    for stage, blocks in enumerate(_blocks_of(pipe)):
        count = forwards[stage] if is_model else forwards[stage] + again[stage]
        for k in blocks:
            assert first[k] == each * count > 0, f"block {k}: {first[k]} calls in {count} micro-batches"
    largest = max(call.rows for call in calls if not call.generates)
    assert largest == rows, f"a block got {largest} rows, not {rows}"


def _expect_in_threads(calls: list[Called]) -> None:
    elsewhere = {call for call in calls if not call.generates and not call.thread.startswith((FORWARDS, WORKERS))}
    assert not elsewhere, f"blocks computed outside the pipe: {sorted(elsewhere)}"


def _blocks_of(pipe: GPipe) -> list[range]:
    """The numbers of the blocks of each stage."""
    return [range(begin, end) for begin, end in pairwise(accumulate(pipe.balance, initial=0))]


def _noting(calls: list[Called], block: int) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        rows = next(leaf.shape[0] for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.dim())
        calls.append(Called(block, threading.current_thread().name, rows, _generates()))

    return note


def _generates() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "gpipe.model._generate":
            return True
    return False
