"""Measures how long each layer takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from microbatch import Batch

from ._arguments import check_module, check_no_gradient, check_sample, check_timeout, running_device
from ._enter import copy_to
from ._isolation import isolated
from ._sandbox import repeatable_sandbox
from ._walk import Visit, walk
from ._watch import Watch, watch_for

if TYPE_CHECKING:
    from ._arguments import Device


class Seconds(NamedTuple):
    """One layer in one round."""

    forward: float
    backward: float


Round = list[Seconds]


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: Device | None) -> list[int]:
    """Microseconds of forward plus backward for each layer, summed over the rounds that fit in `timeout` seconds.

    A round runs every layer once, on a copy. There is an untimed one to warm up, and then at least one. Only the
    ratios between layers mean something: how many rounds there were is not told (`profile` gives seconds).
    """
    check_module(module)
    check_no_gradient(module)
    check_sample(sample)
    check_timeout(timeout)
    device = running_device(device)
    with isolated(device):
        rounds = measure(module, Batch(sample), device, timeout=timeout, least=1)
    return [round(1e6 * sum(map(sum, samples))) for samples in zip(*rounds, strict=True)]


def measure(
    module: nn.Sequential,
    batch: Batch,
    device: torch.device,
    *,
    timeout: float,
    least: int,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
    after_round: Callable[[float], None] = lambda spent: None,
) -> list[Round]:
    """Rounds over all layers until `timeout`, at least `least`, after one that only warms up.

    All layers take turns, so that a slow spell of the machine falls on each of them alike.
    """
    copies = repeatable_sandbox(module, device)
    began = clock()
    rounds: list[Round] = []
    with nullcontext(watch) if watch else watch_for(device) as watch:
        _one_round(module, copies(), copy_to(batch, device), watch)
        while len(rounds) < least or clock() - began < timeout:
            rounds.append(_one_round(module, copies(), copy_to(batch, device), watch))
            after_round(clock() - began)
    return rounds


def _one_round(module: nn.Sequential, copies: Iterator[nn.Module], batch: Batch, watch: Watch) -> Round:
    seconds: Round = []

    def step(visit: Visit) -> Batch:
        output, spent = _timed(visit, watch)
        seconds.append(spent)
        for parameter in visit.layer.parameters():
            parameter.grad = None
        return output

    walk(module, copies, batch, step)
    return seconds


def _timed(visit: Visit, watch: Watch) -> tuple[Batch, Seconds]:
    start = watch.mark()
    output, roots = visit.forward()
    middle = watch.mark()
    gradients = [torch.ones_like(y) for y in roots]
    resumed = watch.mark()
    if roots:
        torch.autograd.backward(roots, gradients)
    end = watch.mark()
    # A layer that differentiates nothing has no backward, not one that takes as long as reading the clock.
    backward = watch.seconds(resumed, end) if roots else 0.0
    return output, Seconds(watch.seconds(start, middle), backward)
