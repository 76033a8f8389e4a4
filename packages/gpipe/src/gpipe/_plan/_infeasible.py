"""The error if no plan fits into memory: which device lacks how many bytes, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from profiler.text import format_bytes

from ._candidate import Candidate, Space
from ._options import Options
from ._search import least_share
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


Relaxation = tuple[str, Callable[[Space], Space]]
"""What could be changed, as text, and what would be searched then instead of a space."""


def explain(space: Space, devices: Sequence[str], relaxations: Sequence[Relaxation]) -> Infeasible:
    """The error for a search that found nothing.

    Args:
        space: what was searched.
        devices: their names.
        relaxations: changes of what the caller asked for, the nearest first.
    """
    share, nearest = _nearest(space)
    rooms = [(j, room) for j, room in enumerate(space.memory) if room is not None]
    short = {j: round((space.share(j, nearest.bytes[j].total) - 1) * room) for j, room in rooms}
    j, room = max(rooms, key=lambda pair: short[pair[0]])
    changes = [*_together(space, relaxations)]
    sizes = {size for _, size in rooms}
    enough = math.ceil(share * max(sizes)) + 1
    changes.append(
        f"{share + 0.005:.2f} times the memory on each device"
        if len(sizes) > 1
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


def _together(space: Space, relaxations: Sequence[Relaxation]) -> Iterator[str]:
    """The changes that are enough each, or else the fewest that are enough together."""
    for count in range(1, len(relaxations) + 1):
        found = [some for some in combinations(relaxations, count) if _fits(space, some)]
        yield from (" and ".join(text for text, _ in some) for some in found)
        if found:
            return


def _fits(space: Space, changes: Sequence[Relaxation]) -> bool:
    for _, change in changes:
        space = change(space)
    return _nearest(space)[0] <= 1


def _nearest(space: Space) -> tuple[float, Candidate]:
    """The least share of their memory that devices need, and the way to train that needs it."""
    # The smallest micro-batches take the least memory; the largest do where most of it does not depend on rows.
    chunks = sorted({space.chunks[0], space.chunks[-1]})
    ways = [Options(space, space.measured.cut(m), name) for m in chunks for name in space.schedules]
    return min(map(least_share, ways), key=lambda each: each[0])
