"""Measures the time of each layer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from microbatch import Batch, unwrap

from ._arguments import check_no_gradient, check_number, check_sample, running_device
from ._clock import Timer, timer_for
from ._enter import copied, is_entrance
from ._isolation import isolated
from ._layers import layers_of
from ._sandbox import repeatable_sandbox
from ._turn import gradients_for
from ._walk import Visit, walk
from .split import BackwardGraph

if TYPE_CHECKING:
    from ._arguments import Device


class Seconds(NamedTuple):
    """The times of one layer in one round.

    Attributes:
        backward_input: the time of the first part of a split backward; None if it was not measured.
    """

    forward: float
    backward: float
    backward_input: float | None = None


Round = list[Seconds]


def profile_times(module: nn.Module, sample: Any, timeout: float, device: Device | None) -> list[int]:
    """Microseconds of forward plus backward for each layer, summed over the rounds that fit in `timeout` seconds.

    A round runs a copy of every layer once. There is one round to warm up, and then at least one. Only the ratios
    between layers are meaningful, since the number of rounds is not returned (`profile_seconds` returns medians).

    Args:
        module, sample, timeout, device: as for :func:`profile_seconds`.

    Returns:
        The microseconds of each layer, a list of int.

    Raises:
        TypeError, ValueError: as :func:`profile`.
    """
    rounds = _measured(module, sample, timeout, device)
    return [round(1e6 * sum(each[0] + each[1] for each in samples)) for samples in zip(*rounds, strict=True)]


def profile_seconds(
    module: nn.Module, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[float]:
    """Seconds of forward plus backward for each layer, medians over rounds; nothing else is measured.

    A round runs a copy of every layer once. There is one round to warm up, and then at least one.

    Args:
        module: as for :func:`profile`.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them.
        timeout: how long to measure, in seconds.
        device: the CPU or an accelerator; by default the accelerator if there is one.

    Returns:
        The seconds of each layer, a list of float.

    Raises:
        TypeError, ValueError: as :func:`profile`.
    """
    rounds = _measured(module, sample, timeout, device)
    return [seconds.forward + seconds.backward for seconds in medians(rounds)]


def _measured(module: nn.Module, sample: Any, timeout: float, device: Device | None) -> list[Round]:
    chain = layers_of(module)
    check_no_gradient(chain)
    check_sample(sample)
    check_number("timeout", timeout, positive=True)
    device = running_device(device)
    with isolated(device):
        return measure(chain, Batch(unwrap(sample)[0]), device, timeout=timeout)


def medians(rounds: Sequence[Round]) -> list[Seconds]:
    """The median of each figure of each layer."""
    from statistics import median  # imported late: it takes as long as the rest of this package

    def middle(values: Sequence[Any]) -> Any:
        return None if None in values else median(values)

    return [Seconds(*map(middle, zip(*samples, strict=True))) for samples in zip(*rounds, strict=True)]


def measure(
    module: nn.Sequential,
    batch: Batch,
    device: torch.device,
    *,
    timeout: float,
    least: int = 1,
    split: bool = False,
    progress: bool = False,
    watch: Timer | None = None,
    clock: Callable[[], float] = lambda: time.perf_counter(),
) -> list[Round]:
    """Rounds over all layers until `timeout`, at least `least`, after one to warm up.

    Layers take turns, so that a disturbance of the machine affects all of them alike.
    """
    copies = repeatable_sandbox(module, device)
    rounds: list[Round] = []
    watch = watch or timer_for(device)
    _one_round(module, copies(), copied(batch, device), watch, split)
    began, spent = clock(), 0.0
    while len(rounds) < least or spent < timeout:
        rounds.append(_one_round(module, copies(), copied(batch, device), watch, split))
        spent = clock() - began
        if progress and sys.stderr.isatty():
            print(f"\rprofiling {min(spent / timeout, 1):4.0%}", end="", file=sys.stderr, flush=True)
    if progress and sys.stderr.isatty():
        print("\r" + " " * 14, end="\r", file=sys.stderr, flush=True)
    return rounds


def _one_round(module: nn.Sequential, copies: Iterator[nn.Module], batch: Batch, watch: Timer, split: bool) -> Round:
    seconds: Round = []

    def step(visit: Visit) -> Batch:
        output, spent = _run(visit, watch, split)
        seconds.append(spent)
        for parameter in visit.layer.parameters():
            parameter.grad = None
        return output

    walk(module, copies, batch, step)
    return seconds


def _run(visit: Visit, watch: Timer, split: bool) -> tuple[Batch, Seconds]:
    """Measures forward and backward of a layer; with ``split`` also the first part of a split backward."""
    start = watch.mark()
    output, roots = visit.forward()
    forward = watch.seconds(start, watch.mark())
    if not roots:  # no backward, which is not one that takes as long as reading the clock
        return output, Seconds(forward, 0.0, 0.0 if split else None)
    gradients = gradients_for(roots)
    part = _first_part(roots, gradients, watch) if split else None
    start = watch.mark()
    torch.autograd.backward(roots, gradients)
    return output, Seconds(forward, watch.seconds(start, watch.mark()), part)


def _first_part(roots: list[Tensor], gradients: list[Tensor], watch: Timer) -> float | None:
    """The seconds of the backward for the inputs alone; None if the backward cannot be split."""
    graph = BackwardGraph([get_gradient_edge(root) for root in roots])
    # Found in the graph: a tensor that the layer overwrites is no longer an input of it.
    inputs: list[Any] = [node.next_functions[0][0].variable for node in graph.nodes if is_entrance(node)]  # type: ignore[union-attr]
    if not inputs:
        return 0.0
    if graph.branches({id(x) for x in inputs}) is None:
        return None
    start = watch.mark()
    torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    return watch.seconds(start, watch.mark())
