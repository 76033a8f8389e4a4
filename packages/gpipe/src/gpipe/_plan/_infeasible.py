"""The error if no plan fits into memory: which device lacks how many bytes, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from profiler.text import format_bytes

from ._candidate import Candidate, Space
from ._search import candidates
from ._table import shown


class Infeasible(ValueError):  # noqa: N818 — a finding about the model and the devices rather than a mistake in the call
    """No plan fits into the memory of the devices.

    Attributes:
        device: the number of the device that lacks the most memory, in the plan that comes closest.
        short: the number of bytes that it lacks.
        changes: changes of the arguments with which a plan would fit, each as text.
    """

    def __init__(self, message: str, device: int, short: int, changes: Sequence[str]) -> None:
        super().__init__(message)
        self.device = device
        self.short = short
        self.changes = tuple(changes)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.device, self.short, self.changes)


Relaxation = tuple[str, Callable[[], Space]]
"""What could be changed, as text, and what would be searched then."""


def explain(space: Space, devices: Sequence[str], relaxations: Sequence[Relaxation]) -> Infeasible:
    """The error for a search that found nothing.

    Args:
        space: what was searched.
        devices: their names.
        relaxations: changes of what the caller asked for, the nearest first.
    """
    scale, nearest = _least_scale(space)
    short = {
        j: need.total - room
        for j, (need, room) in enumerate(zip(nearest.bytes, space.memory, strict=True))
        if room is not None
    }
    j = max(short, key=lambda device: short[device])
    room = space.memory[j]
    assert room is not None  # others are short of nothing
    changes = [text for text, changed in relaxations if _fits(changed())]
    sizes = {round(size * scale) for size in space.memory if size is not None}
    enough = sizes.pop()
    changes.append(
        f"{scale:.2f} times the memory on each device"
        if sizes
        else f"memory={enough} ({format_bytes(enough)} on each device)"
    )
    return Infeasible(
        f"nothing fits: device {j} ({devices[j]}) has {format_bytes(room)} and is {format_bytes(short[j])} short in "
        f"the plan that comes nearest (chunks={nearest.chunks}, {nearest.schedule}, balance={list(nearest.sizes)}, "
        f"checkpoint={[*map(shown, nearest.modes)]}); what would fit: {'; or '.join(changes)}",
        j,
        short[j],
        changes,
    )


def _fits(space: Space) -> bool:
    return next(candidates(space), None) is not None


def _least_scale(space: Space) -> tuple[float, Candidate]:
    """The least factor on the memory of all devices with which something fits, within a hundredth, and what does."""
    # The smallest micro-batches take the least memory; the largest do where most of it does not depend on rows.
    space = replace(space, chunks=sorted({space.chunks[0], space.chunks[-1]}))
    low, high = 1.0, 2.0
    while (found := _scaled(space, high)) is None:
        low, high = high, 2 * high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        nearer = _scaled(space, middle)
        if nearer is None:
            low = middle
        else:
            high, found = middle, nearer
    return high, found


def _scaled(space: Space, factor: float) -> Candidate | None:
    memory = [None if size is None else round(size * factor) for size in space.memory]
    found = candidates(replace(space, memory=memory))
    return min(found, key=lambda each: each.fullest, default=None)
