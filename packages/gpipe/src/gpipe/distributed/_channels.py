"""The channels of a rank: links in memory between its own stages, messages to and from the stages of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from .._current import current
from ..engine._failures import Failures, When
from ..engine._losses import Losses
from ..transport._link import Channel
from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._far_loss import FarLoss
from ._forms import Payload
from ._groups import Groups
from ._messages import Peer, RemoteLink
from ._places import Route, tags
from ._wires import Wires


class Crossing(NamedTuple):
    """A channel between a stage of this rank and one of another.

    Attributes:
        number: the number of the channel.
        leads_away: whether this rank sends values and receives gradients; else the other way round.
        link: the messages in both directions.
        most: how many values may be under way in a run without backwards.
    """

    number: int
    leads_away: bool
    link: RemoteLink
    most: int


def crossings_of(
    groups: Groups,
    ranks: Sequence[int],
    routes: Iterable[Route],
    devices: Mapping[int, torch.device],
    wires: Wires,
) -> Iterator[Crossing]:
    """Those of ``routes`` that end at this rank, which is at one of their ends only.

    Args:
        groups: the ranks, and the connections between them.
        ranks: the rank of each stage.
        routes: the channels between all ranks.
        devices: the device of each stage of this rank.
        wires: for directions in which tensors go from device to device; others go through host memory.
    """
    for number, a, b in routes:
        if groups.me in (ranks[a], ranks[b]):
            leads_away = ranks[a] == groups.me
            here, there = (a, b) if leads_away else (b, a)
            values, gradients = tags(number)
            out, into = (values, gradients) if leads_away else (gradients, values)
            peer = Peer(groups.gloo, ranks[there], out, into)
            link = RemoteLink(peer, devices[here], wires.get(out), wires.get(into))
            # As many as 1F1B holds. Without backwards stage j computes micro-batch t - j in tick t: a sender that waits
            # for what is taken in earlier ticks waits for no rank that waits for it.
            yield Crossing(number, leads_away, link, max(b - a + 1, len(ranks) - a))


class Crossings:
    """All channels between a rank and others, for the life of its pipe.

    Args:
        crossings: these channels.
        wires: the connections from device to device.
    """

    def __init__(self, crossings: Iterable[Crossing], wires: Wires) -> None:
        self._crossings = {crossing.number: crossing for crossing in crossings}
        self._links = [crossing.link for crossing in self._crossings.values()]
        self._wires = wires

    def expect(self, microbatches: int, *, backwards: bool) -> None:
        """Prepare for a run, with or without backwards."""
        for crossing in self._crossings.values():
            comes = backwards or not crossing.leads_away
            crossing.link.expect(microbatches if comes else 0, None if backwards else crossing.most)

    def channel(self, number: int, failures: Failures, loss: Losses | None) -> Channel | None:
        """The channel of that number for a run; None if both its ends are in this process."""
        crossing = self._crossings.get(number)
        return None if crossing is None else RemoteChannel(crossing.link, failures, loss)

    def poison(self, why: When) -> None:
        """Tell all neighbours that this rank sends nothing more in this run, and why."""
        for link in self._links:
            with suppress(UnreachableError):  # the other neighbours still have to be told
                link.poison(why)

    def take(self) -> None:
        """After a failure, before ranks meet: receive all values, so that no rank waits for this one to take them."""
        for crossing in self._crossings.values():
            if not crossing.leads_away:
                with suppress(UnreachableError):  # the meeting finds out who is lost
                    crossing.link.drain(expected=True)

    def drain(self) -> None:
        """After a failed run: receive what is still coming, so that the next run does not read it."""
        for link in self._links:
            link.drain()

    def flush(self) -> None:
        """Wait until everything that was sent has been received."""
        for link in self._links:
            link.flush()

    def settle(self) -> None:
        """Wait until devices have received everything; UnreachableError if that takes too long."""
        self._wires.settle()

    def end(self) -> None:
        """A rank is lost: end all transfers, so that no device waits for it."""
        self._wires.end()


class RemoteChannel(Channel):
    """A channel to a stage on another rank, for one run: values go in one direction, gradients in the other.

    Args:
        link: the messages.
        failures: told when the other rank gives the run up.
        loss: the losses of the run. Each message says whether they return a count, as far as its sender knows.
    """

    __slots__ = ()

    def __init__(self, link: RemoteLink, failures: Failures, loss: Losses | None) -> None:
        arrived: dict[int, Payload] = {}

        def put(microbatch: int, payload: Any) -> None:
            link.put(microbatch, payload, flag=loss is not None and loss.scales)

        def get(microbatch: int) -> Any:
            while microbatch not in arrived:
                try:
                    i, counts, arrived[i] = link.get()
                except Cancelled:
                    failures.hear(link.poisoned)
                    raise
                if isinstance(loss, FarLoss):
                    loss.scales = counts
            payload = arrived.pop(microbatch)
            if current.observed is not None:
                current.observed.got(payload, moved=True)
            return payload

        self.get_values = self.get_gradients = get
        self.put_values = self.put_gradients = put

    def cancel(self) -> None:
        """Nothing: other ranks learn of a failure by :meth:`Crossings.poison`, and no other thread waits here."""
