"""The costs of one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class LayerProfile:
    """The cost of one layer on one micro-batch. Times are in seconds, sizes in bytes.

    name, kind: the name of the layer in the model, and its class.
    forward_seconds, backward_seconds: medians over the rounds; None on ``meta``.
    trainable_bytes, frozen_bytes: bytes of the parameters that require a gradient, and of those that do not. A tensor
        that several layers share is counted for the first.
    buffer_bytes: bytes of the buffers.
    saved_bytes: bytes that the forward allocates and that stay alive, including the output.
    output_bytes: bytes of the output.
    peak_bytes: the peak of the bytes allocated in forward and backward, including gradients, also that of the output.
    flops: floating-point operations of forward and backward: of matrix products, convolutions, attention and recurrent
        layers.
    backward_input_seconds: seconds of the first part of a split backward, for the gradients of the inputs. None unless
        ``split_backward`` was given, and if one operation computes all gradients, as in an LSTM, or a parameter is used
        twice. Both parts together may take longer than the whole.
    passing_bytes: bytes of the output that its own backward does not need; they stay if a later layer saves them.
    freed_bytes: bytes of the input that its own backward does not need, and that are no part of its output.
    largest_parameter_bytes: bytes of its largest trainable parameter.
    """

    name: str
    kind: str
    forward_seconds: float | None
    backward_seconds: float | None
    trainable_bytes: int
    frozen_bytes: int
    buffer_bytes: int
    saved_bytes: int
    output_bytes: int
    peak_bytes: int
    flops: int
    backward_input_seconds: float | None = None
    passing_bytes: int = 0
    freed_bytes: int = 0
    largest_parameter_bytes: int = 0

    @property
    def seconds(self) -> float | None:
        """Forward plus backward."""
        if self.forward_seconds is None or self.backward_seconds is None:
            return None
        return self.forward_seconds + self.backward_seconds

    @property
    def parameter_bytes(self) -> int:
        """Bytes of trainable and frozen parameters."""
        return self.trainable_bytes + self.frozen_bytes


FIGURES = [field.name for field in fields(LayerProfile)[2:]]
"""All fields but the name and the class."""


def between(low: LayerProfile, high: LayerProfile, share: float) -> LayerProfile:
    """The costs between those of one layer with fewer and with more rows; ``share`` 0 is ``low``, 1 is ``high``."""
    return replace(high, **{name: _on_line(getattr(low, name), getattr(high, name), share) for name in FIGURES})


def _on_line(low: Any, high: Any, share: float) -> Any:
    if low is None or high is None:
        return None
    value = max(0, low + (high - low) * share)  # the line may be negative outside of the measured range
    return round(value) if isinstance(low, int) else value
