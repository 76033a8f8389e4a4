"""The costs of one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class LayerProfile:
    """The cost of one layer on one micro-batch. Times are in seconds, sizes in bytes.

    name, kind: the name of the layer in the model, and its class.
    forward_seconds, backward_seconds: medians over the rounds; None on ``meta``.
    trainable_bytes, frozen_bytes: bytes of the parameters with and without ``requires_grad``. A tensor that several
        layers share counts for the first of them.
    buffer_bytes: bytes of the buffers.
    saved_bytes: bytes that the forward allocates and that stay alive, including the output.
    output_bytes: bytes of the output.
    peak_bytes: the peak of the bytes allocated in forward and backward, including gradients and the output's gradient.
    flops: floating-point operations of matrix products, convolutions, attention and recurrent layers, in forward and
        backward.
    backward_input_seconds: seconds of the first part of a split backward, for the gradients of the inputs. None without
        ``split_backward``, if one operation computes all gradients, as in an LSTM, or if a parameter is used twice.
        Both parts together may take longer than an unsplit backward.
    passing_bytes: bytes of the output that the layer's backward does not need; they stay if a later layer saves them.
    freed_bytes: bytes of the input that neither the layer's backward nor its output needs.
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
        """The seconds of forward plus backward; None on ``meta``."""
        if self.forward_seconds is None or self.backward_seconds is None:
            return None
        return self.forward_seconds + self.backward_seconds

    @property
    def parameter_bytes(self) -> int:
        """The bytes of trainable and frozen parameters."""
        return self.trainable_bytes + self.frozen_bytes


FIGURES = [field.name for field in fields(LayerProfile)[2:]]
"""All fields except ``name`` and ``kind``."""


def between(low: LayerProfile, high: LayerProfile, share: float) -> LayerProfile:
    """Interpolate the costs of a layer linearly; ``share`` 0 returns ``low``, and 1 returns ``high``."""
    return replace(high, **{name: _on_line(getattr(low, name), getattr(high, name), share) for name in FIGURES})


def _on_line(low: Any, high: Any, share: float) -> Any:
    if low is None or high is None:
        return None
    value = max(0, low + (high - low) * share)  # extrapolation may be negative
    return round(value) if isinstance(low, int) else value
