"""Time each layer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import streams
from microbatch import Batch

from ._ends import copy_batch, enter_batch, gradients_for, is_entrance
from ._storages import tensor_bytes
from ._walk import Visit, walk
from .sandbox import copy_on
from .split import BackwardGraph


def marker(device: torch.device) -> Callable[[], Any]:
    """Return a function that marks the time after all work that this thread has queued on `device`."""
    if streams.has_streams(device):
        # Events on the current stream are exact although the host runs ahead.
        return lambda: streams.record_event(streams.current_stream(device), timed=True)
    return time.perf_counter  # without streams, work is complete when a call returns


def seconds(start: Any, end: Any) -> float:
    if not isinstance(end, torch.Event):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


_SMALL = 256 * 2**20
"""The largest module, in bytes, whose copies are kept between rounds."""


class Seconds(NamedTuple):
    """The times of one layer in one round, named as in :class:`LayerProfile`."""

    forward_seconds: float
    backward_seconds: float
    backward_input_seconds: float | None = None


Round = list[Seconds]
Mark = Callable[[], Any]


def medians(rounds: Sequence[Round]) -> list[Seconds]:
    from statistics import median  # imported late, because it takes as long as the rest of this package

    def middle(values: Sequence[Any]) -> Any:
        return None if None in values else median(values)

    return [Seconds(*map(middle, zip(*samples, strict=True))) for samples in zip(*rounds, strict=True)]


def measure(
    chain: nn.Sequential,
    batch: Batch,
    device: torch.device,
    *,
    timeout: float,
    least: int = 1,
    split: bool = False,
    progress: bool = False,
) -> list[Round]:
    """Time all layers in rounds: one warm-up, then at least `least` rounds, until `timeout` seconds have passed."""
    mark = marker(device)
    copy: Callable[[nn.Module], nn.Module] = partial(copy_on, device=device)
    if tensor_bytes([*chain.parameters(), *chain.buffers()]) <= _SMALL:
        copy = cache(copy)  # copying a small layer takes longer than running it, so this allows more rounds
    rounds: list[Round] = []

    def step(visit: Visit) -> Batch:
        output, took = _run(visit, mark, split)
        rounds[-1].append(took)
        for parameter in visit.layer.parameters():
            parameter.grad = None
        return output

    def one_round() -> None:
        rounds.append([])
        walk(chain, copy, copy_batch(batch, device), step)

    one_round()
    rounds.clear()  # discard the warm-up
    show = progress and sys.stderr.isatty()
    began, spent = time.perf_counter(), 0.0
    while len(rounds) < least or spent < timeout:
        one_round()
        spent = time.perf_counter() - began
        if show:
            print(f"\rprofiling {min(spent / timeout, 1):4.0%}", end="", file=sys.stderr, flush=True)
    if show:
        print("\r" + " " * 14, end="\r", file=sys.stderr, flush=True)
    return rounds


def _run(visit: Visit, mark: Mark, split: bool) -> tuple[Batch, Seconds]:
    entered = enter_batch(visit.input)
    start = mark()
    output, roots = visit.forward(entered)
    forward = seconds(start, mark())
    if not roots:  # there is no backward, so report 0 and not the time of reading the clock
        return output, Seconds(forward, 0.0, 0.0 if split else None)
    gradients = gradients_for(roots)
    part = _first_part(roots, gradients, mark) if split else None
    start = mark()
    torch.autograd.backward(roots, gradients)
    return output, Seconds(forward, seconds(start, mark()), part)


def _first_part(roots: list[Tensor], gradients: list[Tensor], mark: Mark) -> float | None:
    graph = BackwardGraph([get_gradient_edge(root) for root in roots])
    # Search the graph, because an input that the layer modified in place is no longer the leaf.
    inputs: list[Any] = [node.next_functions[0][0].variable for node in graph.nodes if is_entrance(node)]  # type: ignore[union-attr]
    if not inputs:
        return 0.0
    if graph.branches({id(x) for x in inputs}) is None:
        return None
    start = mark()
    torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    return seconds(start, mark())
