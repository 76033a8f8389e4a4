"""Measures how long each layer takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from microbatch import Batch

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
    """One layer in one round.

    Attributes:
        backward_input: of the part of the backward that the layer before waits for; None if it was not measured.
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

    A round runs every layer once, on a copy. There is an untimed one to warm up, and then at least one. Only the
    ratios between layers are meaningful, since the number of rounds is not returned (`profile_seconds` gives medians).

    Args:
        module, sample, timeout, device: as for :func:`profile_seconds`.

    Returns:
        Microseconds, one number a layer.

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

    A round runs every layer once, on a copy; `sample` is a micro-batch. After a round to warm up come as many as fit:
    the last ends before 1.5 × `timeout` seconds. If none fits, the figures are those of the warm-up.

    Args:
        module: as for :func:`profile`.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them.
        timeout: in seconds.
        device: the CPU or an accelerator, which is the default where there is one.

    Returns:
        Seconds, one number a layer.

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
    return chain, Batch(sample), running_device(device)


def medians(rounds: Sequence[Round]) -> list[Seconds]:
    """The median of each figure of each layer."""
    from statistics import median  # takes as long to import as all the rest of this package

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
    """Rounds over all layers until `timeout`, at least `least`, after one that only warms up.

    All layers take turns, so that a slow spell of the machine falls on each of them alike. With no `least`, the end of
    the last is within 1.5 × `timeout`; if that leaves no time for any, the one that warms up is returned.
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
    """Runs a layer forwards and backwards by a watch.

    Args:
        split: also measure the backward for the inputs alone, where a layer lets autograd do that.
    """

    def __init__(self, watch: Watch, split: bool) -> None:
        self._watch = watch
        self._split = split

    def run(self, visit: Visit) -> tuple[Batch, Seconds]:
        watch = self._watch
        # Edges, because what a layer overwrites is no input of its graph any more.
        inputs = [get_gradient_edge(x) for x in visit.input if x.requires_grad] if self._split else []
        start = watch.mark()
        output, roots = visit.forward()
        middle = watch.mark()
        gradients = gradients_for(roots)
        # A layer that differentiates nothing has no backward, not one that takes as long as reading the clock.
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
        except RuntimeError:  # a reentrant checkpoint, for one, refuses to run for some inputs only
            return None
        return self._watch.seconds(start, self._watch.mark())
