"""The channels of a rank: links in memory between its own stages, messages to and from the stages of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from .._current import current
from ..engine._losses import Losses
from ..skip import SkipLayout
from ..transport._channels import Nearby
from ..transport._link import Channel, Link, Payload
from ..values._describe import Cancelled
from ._crossings import Crossing, crossings_of
from ._errors import UnreachableError
from ._failures import RankFailures
from ._far_loss import FarLoss
from ._groups import Groups
from ._messages import Receiver, Sender
from ._places import channels_between
from ._wires import Wires


class Crossings:
    """All channels between a rank and others, by number, for the life of its pipe.

    Args:
        groups: the ranks, and the connections between them.
        ranks: the rank of each stage.
        layout: the stages between which skips go.
        devices: the device of each stage of this rank.
        wires: for directions in which tensors go from device to device.
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
        found = crossings_of(groups, ranks, channels_between(ranks, layout), devices, wires)
        self._crossings = {crossing.number: crossing for crossing in found}

    def expect(self, microbatches: int, *, backwards: bool) -> None:
        """Prepare for a run, with or without backwards."""
        for crossing in self._crossings.values():
            crossing.sender.expect(None if backwards else crossing.most)
            crossing.receiver.expect(microbatches if backwards or not crossing.leads_away else 0)

    def get(self, number: int) -> Crossing | None:
        """The channel of that number; None if both its ends are in this process."""
        return self._crossings.get(number)

    def poison(self, why: bytes) -> None:
        """Tell all neighbours that this rank sends nothing more in this run, and why."""
        for crossing in self._crossings.values():
            with suppress(UnreachableError):  # the other neighbours still have to be told
                crossing.sender.poison(why)

    def take(self, microbatches: int) -> None:
        """After a failure, before ranks meet: receive all values, so that no rank waits for this one to take them."""
        for crossing in self._crossings.values():
            if not crossing.leads_away:
                with suppress(UnreachableError):  # the meeting finds out who is lost
                    crossing.receiver.drain(microbatches)

    def drain(self) -> None:
        """After a failed run: receive what is still coming, so that the next run does not read it."""
        for crossing in self._crossings.values():
            crossing.receiver.drain()

    def flush(self) -> None:
        """Wait until everything that was sent has been received."""
        for crossing in self._crossings.values():
            crossing.sender.flush()

    def settle(self) -> None:
        """Wait until devices have received everything; UnreachableError if that takes too long."""
        self._wires.settle()

    def end(self) -> None:
        """A rank is lost: end all transfers, so that no device waits for it."""
        self._wires.end()


class Reach:
    """Connects the stages of a rank with each other, and with those of other ranks.

    Args:
        nearby: makes the links between stages of this rank.
        crossings: the channels to other ranks.
        failures: those of the run; it is told of failures of other ranks.
        loss: the losses of the run. Each message with a gradient says whether losses return a count.
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
        sender, receiver = crossing.sender, crossing.receiver
        if crossing.leads_away:
            values: Link[Any] = Outgoing(f"values {name}", sender, self._counts)
            return RemoteChannel(values, Incoming(f"gradients {name}", receiver, self._failures, self._learn))
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
        counts: whether losses return a count, as far as this rank knows.
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
        """Nothing: other ranks learn of a failure by :meth:`Crossings.poison`."""


class Incoming(Link[Payload]):
    """A link whose writer is on another rank.

    Args:
        failures: told when another rank gives the run up.
        learn: called with what the writer knows of the losses.
    """

    __slots__ = ("_failures", "_learn", "_receiver")

    def __init__(
        self,
        name: str,
        receiver: Receiver,
        failures: RankFailures,
        learn: Callable[[bool], None],
    ) -> None:
        self.name = name
        self._receiver = receiver
        self._failures = failures
        self._learn = learn
        self._arrived: dict[int, Any] = {}

    def get(self, microbatch: int) -> Payload:
        while microbatch not in self._arrived:
            i, counts, payload = self._next()
            self._learn(counts)
            self._arrived[i] = payload
        payload = self._arrived.pop(microbatch)
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
        """Nothing: the only thread that could wait here is the one that cancels."""


class RemoteChannel(Channel):
    """A channel to a stage on another rank."""

    __slots__ = ()

    def __init__(self, values: Link[Any], gradients: Link[Any]) -> None:
        self.values, self.gradients = values, gradients
        self.get_values, self.put_values = values.get, values.put
        self.get_gradients, self.put_gradients = gradients.get, gradients.put
