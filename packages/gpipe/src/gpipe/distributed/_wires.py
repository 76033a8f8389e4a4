"""Tensors from accelerator to accelerator, with a communicator and a stream for each direction of a channel.

The head and form of a message go through the host (:mod:`gpipe.distributed._messages`). The head is sent only when the
transfers of its tensors have been queued, so that every tensor that a head announces is on its way. The receiver
allocates memory for them, and its stage's stream waits for them, as for a copy within a process::

    source computes   --y--x--------------------->          x: the wire waits for y
    wire                    \\--send--x                      x: y is recorded with it
    - - - - - - - - - - - - - -\\- - - - - - - - - - - -  another process
    wire                  --recv--x                         x: event
    target computes  --------------\\--reads-->

Why one communicator and one stream for each direction of each channel: the transfers of a communicator, or of a stream,
run one after the other, and each waits for its other end. Two ranks may use different channels in different orders. On
a common communicator, a rank could then wait for a transfer that the other rank queues only behind one that waits for
this rank: a deadlock. The messages of one direction of one channel are read in the order in which they were written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
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

from ..transport._copy import arrived, recorded
from ._agreement import agreement
from ._communicators import communicator_of_two
from ._errors import UnreachableError
from ._forms import Dense, Form, flat
from ._groups import Groups
from ._messages import Peer
from ._places import Place, Route, direct
from ._rendezvous import Rendezvous
from ._watch import Watch


class Wire:
    """One end of a direction of a channel.

    Args:
        peer: the other end, in a process group of the two.
        device: the device of this end.
        watch: checks the transfers of this rank.
    """

    def __init__(self, peer: Peer, device: torch.device, watch: Watch) -> None:
        self._peer = peer
        self._device = device
        self._watch = watch
        self._stream = new_stream(device)
        self._owed: Form | None = None
        self._last: AbstractEvent = None

    def send(self, data: Sequence[Tensor]) -> None:
        """Queue transfers of ``data``, behind the work of the current stream; no thread waits."""
        self._watch.check()
        wait_stream(self._stream, current_stream(self._device))
        with use_stream(self._stream):
            parts = [_bytes(part.to(self._device)) for part in data]
            self._transfer([self._peer.send(part) for part in parts])
        for part in parts:
            recorded(part, self._stream)

    def receive(self, form: Form) -> list[Tensor | None]:
        """The tensors of a message of that form; the current stream waits for them, no thread does."""
        self._watch.check()
        self._owed = form  # until there is memory for them
        with use_stream(self._stream):
            tensors = form.empty(self._device)
            self._owed = None
            parts = [flat(each) for each in tensors if each is not None and each.numel()]
            self._transfer([self._peer.receive(_bytes(part)) for part in parts])
        self._last = record_event(self._stream)
        arrived([*tensors], self._last, current_stream(self._device))
        return tensors

    def open(self, *, leads_away: bool) -> None:
        """Make the communicator, by a first transfer. Both ends call this together."""
        if leads_away:
            self.send([torch.zeros(1, dtype=torch.uint8, device=self._device)])
        else:
            self.receive(Form(None, (Dense(torch.uint8, torch.Size([1]), (1,), requires_grad=False),)))
        wait_stream(CPUStream, self._stream)
        self._watch.check()

    def drain(self) -> None:
        """After a failed run: receive what was not read, for which the sender waits."""
        if self._owed is not None:
            self.receive(self._owed)

    def settle(self) -> None:
        """Wait until everything has been received.

        Raises:
            UnreachableError: that takes too long. All communicators have been aborted.
        """
        wait_event(CPUStream, self._last)
        self._watch.check()

    def _transfer(self, works: list[Any]) -> None:
        self._watch.add(works, self._peer.member)
        for work in works:
            self._peer.wait(work)  # lets the current stream wait, not the thread


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: not every backend knows all types of elements."""
    return tensor.detach().view(-1).view(torch.uint8)


class Wires:
    """All wires of a rank, by the tag of their direction."""

    def __init__(self, found: dict[int, Wire], watch: Watch) -> None:
        self._found = found
        self._watch = watch
        # Not a shutdown, in which all ranks would have to take part. Between runs there are no transfers to lose.
        weakref.finalize(self, watch.end)

    def get(self, tag: int) -> Wire | None:
        """The wire with that tag; None if such messages go through host memory."""
        return self._found.get(tag)

    def settle(self) -> None:
        """Wait until everything has been received; UnreachableError if that takes too long."""
        for wire in self._found.values():
            wire.settle()

    def end(self) -> None:
        """Abort all transfers, because a rank is lost."""
        self._watch.end()


def open_wires(
    meeting: Rendezvous,
    ranks: Sequence[int],
    routes: Iterable[Route],
    devices: Mapping[int, torch.device],
    places: Sequence[Place],
    name: str,
) -> Wires:
    """Open the wires of this rank. All ranks call this together.

    Args:
        meeting: by which ranks learn whether all wires are open.
        ranks: the rank of each stage.
        routes: the channels between all ranks.
        devices: those of the stages of this rank.
        places: those of all stages.
        name: a name that is the same on all ranks, and different in each call.

    Raises:
        RuntimeError: a communicator could not be made, on the rank where that is so; RemoteError on others.
    """
    groups = meeting.groups
    directions = direct(routes, places)
    found, watch = {}, Watch(groups.again("present") if directions else groups)
    if directions:
        with agreement(meeting):
            # All ranks open wires in the same order, so both ends of the first one that is not open yet wait for each
            # other.
            for tag, source, target in directions:
                if groups.me in (ranks[source], ranks[target]):
                    backend, ends = str(places[source].backend), (source, target)
                    found[tag] = _opened(ends, groups, ranks, devices, watch, backend, f"{name}/{tag}")
    return Wires(found, watch)


def _opened(
    ends: tuple[int, int],
    groups: Groups,
    ranks: Sequence[int],
    devices: Mapping[int, torch.device],
    watch: Watch,
    backend: str,
    name: str,
) -> Wire:
    source, target = ends
    leads_away = ranks[source] == groups.me
    here, there = (source, target) if leads_away else (target, source)
    mine, other = groups.members[groups.me], groups.members[ranks[there]]
    try:
        communicator = communicator_of_two(backend, name, groups.timeout, mine, other)
        watch.own(communicator, ranks[there])
        wire = Wire(Peer(communicator, ranks[there], 0, 0, number=int(mine < other)), devices[here], watch)
        wire.open(leads_away=leads_away)
    except (RuntimeError, UnreachableError) as error:
        raise RuntimeError(
            f"rank {mine} cannot reach rank {other} over {backend}, between stages {source} and {target}: {error}; "
            "give transport='host' to send by way of host memory instead"
        ) from error
    return wire
