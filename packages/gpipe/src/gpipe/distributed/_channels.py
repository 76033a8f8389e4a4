"""The channels of a rank: those between its own stages as in one process, the others over messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from .._current import current
from ..engine._losses import Losses
from ..skip import SkipLayout
from ..transport._channels import Nearby
from ..transport._link import Channel, Link, Payload
from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._failures import RankFailures
from ._far_loss import FarLoss
from ._groups import Groups
from ._messages import Peer, Receiver, Sender
from ._places import channels_between, tags
from ._wires import Wires


class Crossing(NamedTuple):
    """A channel between a stage that is here and one that is not.

    Attributes:
        leads_away: whether values leave here; else gradients do.
    """

    sender: Sender
    receiver: Receiver
    leads_away: bool


class Crossings:
    """All of a rank, for the life of its pipe, by the number of the channel.

    Args:
        groups: the ranks, and over what they talk.
        ranks: that of each stage.
        layout: which skips go from where to where.
        devices: of the stages that are here.
        wires: those of the directions in which tensors go from device to device.
    """

    def __init__(
        self,
        groups: Groups,
        ranks: Sequence[int],
        layout: SkipLayout,
        devices: Mapping[int, torch.device],
        wires: Wires,
    ) -> None:
        self._wires = wires
        self._crossings: dict[int, Crossing] = {}
        for number, a, b in channels_between(ranks, layout):
            if groups.me in (ranks[a], ranks[b]):
                leads_away = ranks[a] == groups.me
                here, there = (a, b) if leads_away else (b, a)
                values, gradients = tags(number)
                out, into = (values, gradients) if leads_away else (gradients, values)
                sender = Sender(Peer(groups.values, ranks[there], out), wires.get(out))
                receiver = Receiver(Peer(groups.values, ranks[there], into), devices[here], wires.get(into))
                self._crossings[number] = Crossing(sender, receiver, leads_away)

    def expect(self, microbatches: int, *, backwards: bool) -> None:
        """A run begins; perhaps one that goes forwards only."""
        for crossing in self._crossings.values():
            crossing.receiver.expect(microbatches if backwards or not crossing.leads_away else 0)

    def get(self, number: int) -> Crossing | None:
        """That channel; None if both its ends are here."""
        return self._crossings.get(number)

    def poison(self, why: bytes) -> None:
        """Say to all neighbours that nothing more comes in this run."""
        for crossing in self._crossings.values():
            with suppress(UnreachableError):  # the others want to know all the same
                crossing.sender.poison(why)

    def drain(self) -> None:
        """After a run that has failed: take what has come, until nothing is left for the next one."""
        for crossing in self._crossings.values():
            crossing.receiver.drain()

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        for crossing in self._crossings.values():
            crossing.sender.flush()

    def settle(self) -> None:
        """Wait until devices have all that was received; UnreachableError if it does not come."""
        self._wires.settle()

    def end(self) -> None:
        """Somebody is lost: let no device wait for what will not come."""
        self._wires.end()


class Reach:
    """Connects the stages of a rank to each other, and to those of others.

    Args:
        nearby: connects those that are here.
        crossings: the channels to others.
        failures: of the run; told of what others have failed at.
        loss: of the run. With the gradients goes whether losses say themselves what they count.
    """

    def __init__(self, nearby: Nearby, crossings: Crossings, failures: RankFailures, loss: Losses | None) -> None:
        self._nearby = nearby
        self._crossings = crossings
        self._failures = failures
        self._loss = loss

    def end(self, name: str) -> Channel:
        return self._nearby.end(name)

    def between(self, a: int, b: int, number: int, name: str) -> Channel:
        crossing = self._crossings.get(number)
        if crossing is None:
            return self._nearby.between(a, b, number, name)
        sender, receiver, leads_away = crossing
        if leads_away:
            values: Link[Any] = Outgoing(f"values {name}", sender, self._counts)
            return RemoteChannel(values, Incoming(f"gradients {name}", receiver, self._failures, self._learn, sender))
        gradients: Link[Any] = Outgoing(f"gradients {name}", sender, self._counts)
        return RemoteChannel(Incoming(f"values {name}", receiver, self._failures, self._learn), gradients)

    def _counts(self) -> bool:
        return self._loss is not None and self._loss.scales

    def _learn(self, counts: bool) -> None:
        if isinstance(self._loss, FarLoss):
            self._loss.scales = counts


class Outgoing(Link[Payload]):
    """A link whose reader is on another rank.

    Args:
        counts: whether losses say themselves what they count, as far as is known here.
    """

    __slots__ = ("_counts", "_sender")

    def __init__(self, name: str, sender: Sender, counts: Callable[[], bool]) -> None:
        self.name = name
        self._sender = sender
        self._counts = counts

    def put(self, microbatch: int, payload: Payload) -> None:
        self._sender.put(microbatch, payload, flag=self._counts())

    def get(self, microbatch: int) -> Payload:
        raise AssertionError(f"{self.name}: rank {self._sender.peer.member} reads this")

    def cancel(self) -> None:
        """Others hear of it at the end of the run."""


class Incoming(Link[Payload]):
    """A link whose writer is on another rank.

    Args:
        failures: told when others give up.
        learn: told what the writer knows of the losses.
        answered: what was sent to the same stage before, for a micro-batch that comes back from there.
    """

    __slots__ = ("_answered", "_failures", "_learn", "_receiver")

    def __init__(
        self,
        name: str,
        receiver: Receiver,
        failures: RankFailures,
        learn: Callable[[bool], None],
        answered: Sender | None = None,
    ) -> None:
        self.name = name
        self._receiver = receiver
        self._failures = failures
        self._learn = learn
        self._answered = answered
        self._arrived: dict[int, Any] = {}

    def get(self, microbatch: int) -> Payload:
        while microbatch not in self._arrived:
            i, counts, payload = self._next()
            self._learn(counts)
            self._arrived[i] = payload
        payload = self._arrived.pop(microbatch)
        if self._answered is not None:
            self._answered.forget(microbatch)
        if current.observed is not None:
            current.observed.got(payload, moved=True)
        return payload  # type: ignore[no-any-return]

    def _next(self) -> tuple[int, bool, Any]:
        try:
            return self._receiver.get()
        except Cancelled:
            assert self._receiver.poisoned is not None
            self._failures.hear(self._receiver.poisoned)
            raise

    def cancel(self) -> None:
        """Nobody waits here but the one who cancels."""


class RemoteChannel(Channel):
    """A channel to a stage on another rank."""

    __slots__ = ()

    def __init__(self, values: Link[Any], gradients: Link[Any]) -> None:
        self.values, self.gradients = values, gradients
        self.get_values, self.put_values = values.get, values.put
        self.get_gradients, self.put_gradients = gradients.get, gradients.put
