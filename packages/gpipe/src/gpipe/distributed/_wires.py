"""Tensors from accelerator to accelerator: for each direction of a channel a communicator and a stream of its own.

A message's head goes by way of the host (:mod:`gpipe.distributed._messages`). It says how large its tensors are, and
that they are on their way: they have been asked for before the head is sent, so that no head announces what never
comes. The receiver has memory made for them, and its stage's stream waits for them, as for a copy within a process::

    source computes   --y--x--------------------->          x: the wire waits for y
    wire                    \\--send--x                      x: y is recorded with it
    - - - - - - - - - - - - - -\\- - - - - - - - - - - -  another process
    wire                  --recv--x                         x: event
    target computes  --------------\\--reads-->

Transfers of one communicator are done in order, one after the other, and each waits for its other end. Channels of the
same two ranks are written and read in orders of their own, so that on a common communicator, or behind a common stream,
the next transfer of one rank could wait for one that the other rank comes to only after it: for ever. Hence both are
those of one direction of one channel, whose messages are read in the order in which they were written.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streams import (
    AbstractEvent,
    CPUStream,
    current_stream,
    new_stream,
    record_event,
    use_stream,
    wait_event,
    wait_stream,
)

from ..skip import SkipLayout
from ..transport._copy import arrived, recorded
from ._agreement import Meeting, agreement
from ._communicators import communicator_of_two
from ._errors import UnreachableError
from ._groups import Groups
from ._messages import Peer
from ._places import Direction, Place, direct
from ._watch import Watch


class Wire:
    """One end of a direction of a channel.

    Args:
        peer: the other end, in a process group of the two.
        device: of this end.
        watch: of all wires of this rank.
    """

    def __init__(self, peer: Peer, device: torch.device, watch: Watch) -> None:
        self._peer = peer
        self._device = device
        self._watch = watch
        self._stream = new_stream(device)
        self._owed: Sequence[int] = ()
        self._last: AbstractEvent = None

    def send(self, data: Sequence[Tensor]) -> None:
        """Queue transfers of what the current stream computes; no thread waits."""
        self._watch.check()
        wait_stream(self._stream, current_stream(self._device))
        with use_stream(self._stream):
            parts = [part.to(self._device) for part in data if part.numel()]
            self._transfer([self._peer.send(part) for part in parts])
        for part in parts:
            recorded(part, self._stream)

    def receive(self, sizes: Sequence[int]) -> list[Tensor]:
        """So many bytes each, for which the current stream waits; no thread does."""
        self._watch.check()
        self._owed = sizes
        with use_stream(self._stream):
            parts: Any = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
            self._owed = ()
            self._transfer([self._peer.receive(part) for part in parts if part.numel()])
        self._last = record_event(self._stream)
        arrived(parts, self._last, current_stream(self._device))
        return parts  # type: ignore[no-any-return]

    def open(self, *, leads_away: bool) -> None:
        """Make the communicator, by a first transfer; both ends come here."""
        if leads_away:
            self.send([torch.zeros(1, dtype=torch.uint8, device=self._device)])
        else:
            self.receive([1])
        wait_stream(CPUStream, self._stream)
        self._watch.check()

    def drain(self) -> None:
        """Take what there was no memory for; the sender waits for that."""
        if self._owed:
            self.receive(self._owed)

    def settle(self) -> None:
        """Wait until all that was received is there.

        Raises:
            UnreachableError: it has not come in time. All communicators have ended.
        """
        wait_event(CPUStream, self._last)
        self._watch.check()

    def _transfer(self, works: list[Any]) -> None:
        self._watch.add(works, self._peer.member)
        for work in works:
            self._peer.wait(work)  # no thread: the current stream


class Wires:
    """All of a rank, by the tag of their direction."""

    def __init__(self, found: dict[int, Wire], watch: Watch) -> None:
        self._found = found
        self._watch = watch
        # Not shut down, for which the other ranks would have to be there too. Between runs nothing is under way.
        weakref.finalize(self, watch.end)

    def get(self, tag: int) -> Wire | None:
        """That wire; None if such messages go by way of host memory."""
        return self._found.get(tag)

    def settle(self) -> None:
        """Wait until all that was received is there; UnreachableError if it does not come."""
        for wire in self._found.values():
            wire.settle()

    def end(self) -> None:
        """End what is under way: somebody is lost."""
        self._watch.end()


def open_wires(
    meeting: Meeting,
    groups: Groups,
    ranks: Sequence[int],
    layout: SkipLayout,
    ties: Sequence[tuple[int, int]],
    devices: Sequence[torch.device],
    places: Sequence[Place],
    name: str,
) -> Wires:
    """The wires of this rank; all ranks call this.

    Args:
        meeting: where they agree that all of theirs are open.
        ties: see :func:`direct`.
        devices, places: of all stages; devices of other ranks are not looked at.
        name: of all wires together, the same on all ranks, and different each time.

    Raises:
        RuntimeError: a communicator could not be made, on the rank where that is so; RemoteError on others.
    """
    found, watch = {}, Watch(groups.timeout)
    directions = direct(ranks, layout, ties, places)
    if directions:
        with agreement(meeting, groups.members):
            # All go through the list in its order: the first one that is not open has both its ends at it.
            for each in directions:
                if groups.me in (ranks[each.source], ranks[each.target]):
                    backend = str(places[each.source].backend)
                    found[each.tag] = _opened(each, groups, ranks, devices, watch, backend, f"{name}/{each.tag}")
    return Wires(found, watch)


def _opened(
    direction: Direction,
    groups: Groups,
    ranks: Sequence[int],
    devices: Sequence[torch.device],
    watch: Watch,
    backend: str,
    name: str,
) -> Wire:
    _, source, target = direction
    leads_away = ranks[source] == groups.me
    here, there = (source, target) if leads_away else (target, source)
    mine, other = groups.members[groups.me], groups.members[ranks[there]]
    try:
        communicator = communicator_of_two(backend, name, groups.timeout, mine, other)
        watch.own(communicator)
        wire = Wire(Peer(communicator, ranks[there], 0, number=int(mine < other)), devices[here], watch)
        wire.open(leads_away=leads_away)
    except (RuntimeError, UnreachableError) as error:
        raise RuntimeError(
            f"rank {mine} cannot reach rank {other} over {backend}, between stages {source} and {target}: {error}; "
            "give transport='host' to send by way of host memory instead"
        ) from error
    return wire
