"""The channels of a run: between neighboring stages, to and from the caller, and one per skip."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from streams import waiting

from ..skip import SkipLayout
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ..values._sharing import divide_activation, join_activations
from ._copy import StagePlace, carriers

Payload = TypeVar("Payload")

_POISON = -1
_log = logging.getLogger("gpipe")


class Carrier(Protocol):
    """Moves payloads between devices: ``send`` runs on the source's worker, ``receive`` on the target's."""

    def send(self, payload: Any) -> Any: ...

    def receive(self, parcel: Any) -> Any: ...


class Got(Protocol):
    """A callback for each payload that has arrived; ``moved`` if it comes from another device or process."""

    def __call__(self, payload: Any, *, moved: bool) -> None: ...


class Link(Generic[Payload]):
    """A queue from one worker to another, with one payload per micro-batch. Only its reader waits.

    Args:
        name: a name for messages, such as ``values between partitions 0 and 1``.
        carrier: copies payloads between devices; None if source and target share their memory.
        stall_timeout: a wait is logged after this many seconds; None to log nothing.
        is_cancelled: called by a reader after a failure; returns whether its payload will not arrive.
        got: called by the reader with each payload, and whether it was copied.
    """

    __slots__ = ("_arrived", "_carrier", "_got", "_is_cancelled", "_queue", "_stall_timeout", "name")

    def __init__(
        self,
        name: str,
        carrier: Carrier | None = None,
        stall_timeout: float | None = None,
        is_cancelled: Callable[[], bool] = lambda: True,
        got: Got | None = None,
    ) -> None:
        self.name = name
        self._carrier = carrier
        self._stall_timeout = stall_timeout
        self._is_cancelled = is_cancelled
        self._got = got
        self._queue: waiting.SimpleQueue[tuple[int, Any]] = waiting.SimpleQueue()
        self._arrived: dict[int, Any] = {}

    def put(self, microbatch: int, payload: Payload) -> None:
        """Start to send the payload of a micro-batch."""
        # The copy is queued here, on the sender's thread, after the work that computes the payload.
        self._queue.put((microbatch, payload if self._carrier is None else self._carrier.send(payload)))

    def get(self, microbatch: int) -> Payload:
        """Wait for the payload of a micro-batch. Raises :class:`Cancelled` if it will not arrive."""
        # Backwards may read micro-batches in a different order than the forwards sent them.
        arrived = self._arrived
        while microbatch not in arrived:
            try:
                i, parcel = self._queue.get(timeout=self._stall_timeout)
            except Empty:
                seconds = self._stall_timeout
                _log.warning("no %s for micro-batch %d in %g s; still waiting", self.name, microbatch, seconds)
                continue
            if i != _POISON:
                arrived[i] = parcel
            elif self._is_cancelled():
                raise Cancelled
        # Dropped here, so that a payload is freed with the cell that reads it.
        payload: Payload = arrived.pop(microbatch)
        if self._carrier is not None:
            payload = self._carrier.receive(payload)
        if self._got is not None:
            self._got(payload, moved=self._carrier is not None)
        return payload

    def cancel(self) -> None:
        """Wake the reader. It raises :class:`Cancelled` if its payload will not arrive."""
        self._queue.put((_POISON, None))


class Channel:
    """The two links between a stage and an earlier one: values forward, and their gradients back."""

    __slots__ = ("get_gradients", "get_values", "gradients", "put_gradients", "put_values", "values")

    def __init__(self, values: Link[Activation], gradients: Link[list[Tensor | None]]) -> None:
        self.values, self.gradients = values, gradients
        # Bound once, because each cell makes four such calls.
        self.get_values, self.put_values = values.get, values.put
        self.get_gradients, self.put_gradients = gradients.get, gradients.put

    def cancel(self) -> None:
        self.values.cancel()
        self.gradients.cancel()


class OuterChannel:
    """The channel between the caller and the first stage, or the last stage and the caller. Its reader never waits.

    The caller puts everything in before the workers start, and takes everything out after they have finished.
    """

    __slots__ = ("get_gradients", "get_values", "gradients", "put_gradients", "put_values", "values")

    def __init__(self) -> None:
        self.values: dict[int, Activation] = {}
        self.gradients: dict[int, list[Tensor | None]] = {}
        # Read with pop, because the run lives on between forward and backward, and must not keep unneeded outputs.
        self.get_values, self.put_values = self.values.pop, self.values.__setitem__
        self.get_gradients, self.put_gradients = self.gradients.pop, self.gradients.__setitem__


class Ports:
    """Several channels with the interface of one :class:`Channel`: the main one first, then one per skip.

    The combined activation is a tuple of the main value and the skips.
    """

    __slots__ = ("_channels", "_sizes")

    def __init__(self, channels: Sequence[AnyChannel]) -> None:
        self._channels = channels
        self._sizes: dict[int, list[int]] = {}

    def get_values(self, i: int) -> Activation:
        parts = [channel.get_values(i) for channel in self._channels]
        self._sizes[i] = [len(part.tensors) for part in parts]
        # The stage expects the skips after the main value.
        return join_activations(parts)

    def put_values(self, i: int, activation: Activation) -> None:
        parts = divide_activation(activation)
        # The cell returns the gradients of all parts as one list, which has to be split again.
        self._sizes[i] = [len(part.tensors) for part in parts]
        for channel, part in zip(self._channels, parts, strict=True):
            channel.put_values(i, part)

    def get_gradients(self, i: int) -> list[Tensor | None]:
        return [gradient for channel in self._channels for gradient in channel.get_gradients(i)]

    def put_gradients(self, i: int, gradients: list[Tensor | None]) -> None:
        flowing = iter(gradients)
        for channel, size in zip(self._channels, self._sizes.pop(i), strict=True):
            channel.put_gradients(i, [next(flowing) for _ in range(size)])


AnyChannel = Channel | OuterChannel | Ports
"""A channel that a stage receives from or sends to."""


def stall_seconds() -> float | None:
    """Return ``GPIPE_STALL_SECONDS``, the time after which a waiting worker logs a warning; None if it is not set."""
    text = os.environ.get("GPIPE_STALL_SECONDS")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"GPIPE_STALL_SECONDS must be a positive number of seconds; got {text!r}")
    return seconds


class Transport:
    """The channels of one run, for the stages of this process.

    Args:
        places: the device and streams of these stages, by index. Available as an attribute.
        count: the number of stages in all processes.
        layout: the skips between the stages of all processes.
        is_cancelled: returns whether the payload that a reader waits for will not arrive.
        remote: returns the channel with this index, if one of its ends is in another process, else None.
        got: called with each payload that arrives.

    Attributes:
        entrance, exit: the channels between the caller and the first stage, and the last stage and the caller.
        arrivals, departures: the channels into and out of each stage of this process, by stage index.
    """

    def __init__(
        self,
        places: Mapping[int, StagePlace],
        count: int,
        layout: SkipLayout,
        is_cancelled: Callable[[], bool] = lambda: True,
        remote: Callable[[int], Channel | None] = lambda number: None,
        got: Got | None = None,
    ) -> None:
        self.places = places
        self._remote = remote
        self._link = partial(Link[Any], stall_timeout=stall_seconds(), is_cancelled=is_cancelled, got=got)
        self._inner: list[Channel] = []
        self.entrance, self.exit = OuterChannel(), OuterChannel()
        main: dict[int, AnyChannel] = {0: self.entrance, count: self.exit}
        for j in range(1, count):
            # A process has the channels with at least one end at one of its stages.
            if not places.keys().isdisjoint((j - 1, j)):
                main[j] = self.between(j - 1, j, j, f"between partitions {j - 1} and {j}")
        self.arrivals: dict[int, AnyChannel] = {j: main[j] for j in places}
        self.departures: dict[int, AnyChannel] = {j: main[j + 1] for j in places}
        if layout.routes:
            self._add_skips(layout, count)

    def between(self, a: int, b: int, number: int, name: str) -> Channel:
        """Create the channel from stage ``a`` to stage ``b``, with the index ``number`` in the whole pipeline."""
        channel = self._remote(number)
        if channel is None:
            forth, back = carriers(self.places[a], self.places[b])
            channel = Channel(self._link(f"values {name}", forth), self._link(f"gradients {name}", back))
        self._inner.append(channel)
        return channel

    def _add_skips(self, layout: SkipLayout, count: int) -> None:
        popped: dict[int, list[AnyChannel]] = {j: [main] for j, main in self.arrivals.items()}
        stashed: dict[int, list[AnyChannel]] = {j: [main] for j, main in self.departures.items()}
        # Every process gives a skip the same number, even if it has neither end of it.
        for number, (key, source, target) in enumerate(layout.routes, start=count):
            if source in self.places or target in self.places:
                skip = self.between(
                    source, target, number, f"of skip {key[1]!r} between partitions {source} and {target}"
                )
                popped.setdefault(target, []).append(skip)
                stashed.setdefault(source, []).append(skip)
        self.arrivals |= {j: Ports(popped[j]) for j in self.arrivals if len(popped[j]) > 1}
        self.departures |= {j: Ports(stashed[j]) for j in self.departures if len(stashed[j]) > 1}

    def cancel(self) -> None:
        # The channels to and from the caller are not cancelled, because their readers never wait.
        for channel in self._inner:
            channel.cancel()
