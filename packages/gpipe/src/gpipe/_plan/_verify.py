"""Measure a planned pipe and compare it with the prediction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profiler import AllocationTracker
from profiler.memory import attached, held_bytes
from profiler.text import align, format_bytes, format_seconds

from .._chooser import RUNS
from .._gpipe import GPipe
from ..engine._settings import with_settings
from ..schedule import SPLITTING, Schedule
from ..timeline import Timeline, record
from ..timeline._record import Recorder

if TYPE_CHECKING:
    from ._plan import Plan

Loss = Mapping[str, Any]
"""The arguments of a step that describe its loss: ``loss_fn`` and ``reduction``."""

STEPS = 3
"""The number of timed steps."""


@dataclass(frozen=True)
class Verification:
    """Predicted and measured time and memory of a step.

    Attributes:
        predicted_seconds, seconds: the seconds of a step, without the optimizer step; ``seconds`` is the median of
            several steps.
        predicted_bytes, bytes: the peak bytes of each device, without the state of the optimizer.
        timeline: the timeline of one step.
    """

    predicted_seconds: float
    seconds: float
    predicted_bytes: tuple[int, ...]
    bytes: tuple[int, ...]
    timeline: Timeline

    @property
    def ratio(self) -> float:
        """Predicted seconds divided by measured seconds."""
        return self.predicted_seconds / self.seconds

    @property
    def byte_ratios(self) -> list[float]:
        """Predicted bytes divided by measured bytes, per device."""
        return [found / true for found, true in zip(self.predicted_bytes, self.bytes, strict=True)]

    def __str__(self) -> str:
        rows = [
            ["", "predicted", "measured", "ratio"],
            ["a step", format_seconds(self.predicted_seconds), format_seconds(self.seconds), f"{self.ratio:.2f}"],
        ]
        for j, ratio in enumerate(self.byte_ratios):
            sizes = format_bytes(self.predicted_bytes[j]), format_bytes(self.bytes[j])
            rows.append([f"device {j}", *sizes, f"{ratio:.2f}"])
        return align(rows, left=1)


def verify(plan: Plan, pipe: GPipe, x: Any, y: Any, loss: Loss) -> Verification:
    """Train for some steps, and compare measured with predicted time and memory.

    Args:
        plan: the plan.
        pipe: the planned pipe. Its gradients and buffers are restored.
        x, y: as for :meth:`gpipe.Plan.verify`.
        loss: the arguments of a step that describe its loss.

    Returns:
        Predicted and measured figures, and the timeline of a step.
    """
    schedule = plan.step_arguments["schedule"]
    with as_before(pipe):
        seconds = time_steps(pipe, x, y, loss, schedule)
        with record() as timeline:
            pipe.step(x, y, **loss, schedule=schedule)
        # The memory of loaded parameters is not allocated by actions.
        sizes = [] if plan.offload else peak_bytes(pipe, x, y, loss, schedule, plan.placement)
    predicted = () if plan.offload else tuple(need.total - need.optimizer for need in plan.predicted.bytes)
    return Verification(plan.predicted.seconds.mid, median(seconds), predicted, tuple(sizes), timeline)


def time_steps(pipe: GPipe, x: Any, y: Any, loss: Loss, schedule: str | Schedule) -> list[float]:
    """Return the seconds of each of :data:`STEPS` training steps, after warm-up steps."""

    def step() -> float:
        pipe.zero_grad()
        begin = time.perf_counter()
        pipe.step(x, y, **loss, schedule=schedule)
        _synchronize(pipe.devices)
        return time.perf_counter() - begin

    warm = 1 + RUNS if schedule in SPLITTING else 1  # the pipe measures which backwards are worth splitting
    return [step() for _ in range(warm + STEPS)][warm:]


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work queued on these devices."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def peak_bytes(
    pipe: GPipe, x: Any, y: Any, loss: Loss, schedule: str | Schedule, placement: Sequence[int]
) -> list[int]:
    """Return the peak bytes of each device in a step, without the state of an optimizer.

    They include the parameters and buffers of its stages, and all storages that their actions allocate.
    """
    trackers = [AllocationTracker() for _ in range(max(placement) + 1)]
    of_stages = {j: trackers[place] for j, place in enumerate(placement)}  # stages of a device share a tracker
    pipe.zero_grad()
    with with_settings(observer=Recorder(lambda _: of_stages)):
        pipe.step(x, y, **loss, schedule=schedule)
    there: list[set[Tensor]] = [set() for _ in trackers]
    for place, stage in zip(placement, pipe.partitions, strict=True):
        there[place].update(stage.parameters(), stage.buffers(), *map(attached, stage.modules()))
    return [tracker.peak + held_bytes(own) for tracker, own in zip(trackers, there, strict=True)]


@contextmanager
def as_before(pipe: GPipe) -> Iterator[None]:
    """Restore gradients and buffers at the end of a ``with`` block. Steps inside set gradients to None."""
    gradients = [(parameter, parameter.grad) for parameter in pipe.parameters()]
    owners = [module._buffers for module in pipe.modules()]
    # An expanded buffer can be neither modified nor restored.
    buffers = [
        (own, name, buffer, buffer.clone())
        for own in owners
        for name, buffer in own.items()
        if buffer is not None and not _is_expanded(buffer)
    ]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for own, name, buffer, value in buffers:
                own[name] = buffer.copy_(value)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements of ``tensor`` have the same memory."""
    layout = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(size > 1 and not stride for size, stride in layout)
