"""One side of a stage: the channels to its neighbour, and the skips that begin or end there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from microbatch import Batch

from ._link import Channel
from ._value import SharedBatch


class Ports:
    """Several channels that look like one: the main one first, then a channel for each skip.

    What goes through them all is one batch: of the main value alone, or of a tuple of it and the skips.
    """

    __slots__ = ("_channels", "_main", "_sizes")

    def __init__(self, main: Channel, skips: Sequence[Channel] = ()) -> None:
        self._main = main
        self._channels = (main, *skips) if skips else ()
        self._sizes: dict[int, list[int]] = {}

    def get_values(self, i: int) -> Batch:
        """Wait for what the stages before have sent."""
        if not self._channels:
            return self._main.values.get(i)
        parts = [channel.values.get(i) for channel in self._channels]
        self._sizes[i] = [len(part) for part in parts]
        shared = any(isinstance(part, SharedBatch) for part in parts)
        return (SharedBatch if shared else Batch)(tuple([part.value for part in parts]))

    def put_values(self, i: int, batch: Batch) -> None:
        """Send each part to the stage that needs it."""
        if not self._channels:
            self._main.values.put(i, batch)
            return
        parts = [type(batch)(value) for value in batch.value]
        self._sizes[i] = [len(part) for part in parts]
        for channel, part in zip(self._channels, parts, strict=True):
            channel.values.put(i, part)

    def get_gradients(self, i: int) -> list[Tensor | None]:
        """Wait for the gradients of what :meth:`put_values` sent, one for each tensor."""
        if not self._channels:
            return self._main.gradients.get(i)
        return [gradient for channel in self._channels for gradient in channel.gradients.get(i)]

    def put_gradients(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        """Send back the gradients of what :meth:`get_values` got."""
        if not self._channels:
            self._main.gradients.put(i, list(gradients))
            return
        flowing = iter(gradients)
        for channel, size in zip(self._channels, self._sizes.pop(i), strict=True):
            channel.gradients.put(i, [next(flowing) for _ in range(size)])
