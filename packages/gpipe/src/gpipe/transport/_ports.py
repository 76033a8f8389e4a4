"""One side of a stage: the channels to its neighbour, and the skips that begin or end there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from microbatch import Batch

from ..values._aliases import Aliased
from ..values._sharing import divided, joined
from ._link import Channel

Gradients = list[Tensor | None]


class Port:
    """A single channel, as most stages have on either side.

    Attributes:
        get_values: wait for the batch of a micro-batch, which the stage before has sent.
        put_values: send one to the stage after.
        get_gradients: wait for the gradients of what was sent, one for each tensor.
        put_gradients: send back those of what was got.
    """

    __slots__ = ("get_gradients", "get_values", "put_gradients", "put_values")

    def __init__(self, channel: Channel) -> None:
        self.get_values: Callable[[int], Batch] = channel.values.get
        self.put_values: Callable[[int, Batch], None] = channel.values.put
        self.get_gradients: Callable[[int], Gradients] = channel.gradients.get
        self.put_gradients: Callable[[int, Gradients], None] = channel.gradients.put


class Ports:
    """Several channels that look like one :class:`Port`: the main one first, then a channel for each skip.

    What goes through them all is a batch of a tuple of the main value and the skips.
    """

    __slots__ = ("_aliased", "_channels", "_sizes")

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._sizes: dict[int, list[int]] = {}
        self._aliased: dict[int, Aliased] = {}

    def get_values(self, i: int) -> Batch:
        """Wait for what the stages before have sent."""
        parts = [channel.values.get(i) for channel in self._channels]
        self._sizes[i] = [len(part) for part in parts]
        batch = joined(parts)
        if isinstance(batch.value, Aliased):
            self._aliased[i] = batch.value
        return batch

    def put_values(self, i: int, batch: Batch) -> None:
        """Send each part to the stage that needs it."""
        parts = divided(batch)
        self._sizes[i] = [len(part) for part in parts]
        for channel, part in zip(self._channels, parts, strict=True):
            channel.values.put(i, part)

    def get_gradients(self, i: int) -> Gradients:
        """Wait for the gradients of what :meth:`put_values` sent, one for each tensor."""
        return [gradient for channel in self._channels for gradient in channel.gradients.get(i)]

    def put_gradients(self, i: int, gradients: Gradients) -> None:
        """Send back the gradients of what :meth:`get_values` got."""
        aliased = self._aliased.pop(i, None)
        flowing = iter(gradients if aliased is None else aliased.spread(gradients))
        for channel, size in zip(self._channels, self._sizes.pop(i), strict=True):
            channel.gradients.put(i, [next(flowing) for _ in range(size)])
