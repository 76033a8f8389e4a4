"""The main channel of a stage and those of its skips, combined into one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..values._leaves import Activation
from ..values._sharing import divided, joined
from ._link import Channel

Gradients = list[Tensor | None]


class Ports:
    """Several channels with the interface of one :class:`Channel`: the main one first, then one for each skip.

    The combined activation is a tuple of the main value and the skips.
    """

    __slots__ = ("_channels", "_sizes")

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._sizes: dict[int, list[int]] = {}

    def get_values(self, i: int) -> Activation:
        """Wait for what the stages before have sent."""
        parts = [channel.get_values(i) for channel in self._channels]
        self._sizes[i] = [len(part.tensors) for part in parts]
        return joined(parts)

    def put_values(self, i: int, activation: Activation) -> None:
        """Send each part to the stage that needs it."""
        parts = divided(activation)
        self._sizes[i] = [len(part.tensors) for part in parts]
        for channel, part in zip(self._channels, parts, strict=True):
            channel.put_values(i, part)

    def get_gradients(self, i: int) -> Gradients:
        """Wait for the gradients of what :meth:`put_values` sent, one for each tensor."""
        return [gradient for channel in self._channels for gradient in channel.get_gradients(i)]

    def put_gradients(self, i: int, gradients: Gradients) -> None:
        """Send back the gradients of what :meth:`get_values` got."""
        flowing = iter(gradients)
        for channel, size in zip(self._channels, self._sizes.pop(i), strict=True):
            channel.put_gradients(i, [next(flowing) for _ in range(size)])
