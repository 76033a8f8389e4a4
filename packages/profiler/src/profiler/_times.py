"""Measures the time of each layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from microbatch import Batch, unwrap

from ._arguments import check_no_gradient, check_sample, check_timeout, running_device
from ._enter import copy_to
from ._isolation import isolated
from ._layers import layers_of
from ._sandbox import repeatable_sandbox
from ._walk import Visit, gradients_for, walk
from ._watch import Watch, watch_for

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

    @property
    def both(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


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
    chain, batch, device = _checked(module, sample, timeout, device)
    with isolated(device):
        rounds = measure(chain, batch, device, timeout=timeout, least=1)
    return [round(1e6 * sum(seconds.both for seconds in samples)) for samples in zip(*rounds, strict=True)]


def profile_seconds(
    module: nn.Module, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[float]:
    """Seconds of forward plus backward for each layer, medians over rounds; nothing else is measured.

    A round runs a copy of every layer once. After one round to warm up there are as many as fit: the last ends before
    1.5 × `timeout` seconds. If none fits, the figures are those of the first round.

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
    chain, batch, device = _checked(module, sample, timeout, device)
    with isolated(device):
        rounds = measure(chain, batch, device, timeout=timeout, least=0)
    return [seconds.both for seconds in medians(rounds)]


def _checked(
    module: nn.Module, sample: Any, timeout: float, device: Device | None
) -> tuple[nn.Sequential, Batch, torch.device]:
    chain = layers_of(module)
    check_no_gradient(chain)
    check_sample(sample)
    check_timeout(timeout)
    return chain, Batch(unwrap(sample)[0]), running_device(device)


def medians(rounds: Sequence[Round]) -> list[Seconds]:
    """The median of each figure of each layer."""
    from statistics import median  # imported late: it takes as long as the rest of this package

    def middle(values: list[float | None]) -> float | None:
        return median(known) if len(known := [value for value in values if value is not None]) == len(values) else None

    return [
        Seconds(
            median(s.forward for s in samples), median(s.backward for s in samples), middle([s[2] for s in samples])
        )
        for samples in zip(*rounds, strict=True)
    ]


def measure(
    module: nn.Sequential,
    batch: Batch,
    device: torch.device,
    *,
    timeout: float,
    least: int,
    split: bool = False,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
    after_round: Callable[[float], None] = lambda spent: None,
) -> list[Round]:
    """Rounds over all layers until `timeout`, at least `least`, after one to warm up.

    Layers take turns, so that a disturbance of the machine affects all of them alike. If `least` is 0, the last round
    ends within 1.5 × `timeout`; if there is no time for any, the first round is returned.
    """
    copies = repeatable_sandbox(module, device)
    rounds: list[Round] = []
    with nullcontext(watch) if watch else watch_for(device) as watch:
        timer = _Timer(watch, split)
        first = _one_round(module, copies(), copy_to(batch, device), timer)
        began = clock()
        spent = last = 0.0
        if not least:
            last = sum(seconds.both for seconds in first)
        while len(rounds) < least or (spent < timeout and (least or spent + last <= 1.5 * timeout)):
            rounds.append(_one_round(module, copies(), copy_to(batch, device), timer))
            before, spent = spent, clock() - began
            last = spent - before
            after_round(spent)
    return rounds or [first]


def _one_round(module: nn.Sequential, copies: Iterator[nn.Module], batch: Batch, timer: _Timer) -> Round:
    seconds: Round = []

    def step(visit: Visit) -> Batch:
        output, spent = timer.run(visit)
        seconds.append(spent)
        for parameter in visit.layer.parameters():
            parameter.grad = None
        return output

    walk(module, copies, batch, step)
    return seconds


class _Timer:
    """Measures forward and backward of a layer with a watch.

    Args:
        split: whether to measure the first part of a split backward too, if the backward can be split.
    """

    def __init__(self, watch: Watch, split: bool) -> None:
        self._watch = watch
        self._split = split

    def run(self, visit: Visit) -> tuple[Batch, Seconds]:
        watch = self._watch
        # Edges, because a tensor that the layer overwrites is no longer an input of its graph.
        inputs = [get_gradient_edge(x) for x in visit.input if x.requires_grad] if self._split else []
        start = watch.mark()
        output, roots = visit.forward()
        middle = watch.mark()
        gradients = gradients_for(roots)
        # A layer without a graph has no backward, not one that takes as long as reading the clock.
        if not roots:
            return output, Seconds(watch.seconds(start, middle), 0.0, 0.0 if self._split else None)
        part = self._backward_input(inputs, roots, gradients) if self._split else None
        resumed = watch.mark()
        torch.autograd.backward(roots, gradients)
        end = watch.mark()
        return output, Seconds(watch.seconds(start, middle), watch.seconds(resumed, end), part)

    def _backward_input(
        self, inputs: Sequence[GradientEdge], roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> float | None:
        if not inputs:
            return 0.0
        start = self._watch.mark()
        try:
            torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
        except RuntimeError:  # such as a reentrant checkpoint, which cannot run for some inputs only
            return None
        return self._watch.seconds(start, self._watch.mark())
