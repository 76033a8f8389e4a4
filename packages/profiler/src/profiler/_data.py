"""What a profile found, as plain data; :class:`profiler.Profile` adds what can be done with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import SupportsIndex, overload


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs on one micro-batch.

    name, kind: its name in the Sequential, and its class.
    forward_seconds, backward_seconds: medians over the rounds; None if nothing was run.
    trainable_bytes, frozen_bytes: of its parameters, by whether they require a gradient. What several layers share
        counts for the first.
    buffer_bytes: of its buffers.
    saved_bytes: of the storages that its forward creates and leaves alive, its output among them.
    output_bytes: of its output, which is what has to cross if a partition ends here.
    peak_bytes: the most that storages created in its forward and backward take at any one time, gradients included,
        also that of its output.
    flops: of forward and backward, of matrix products, convolutions, attention and recurrent layers.
    allocated_bytes, allocated_peak_bytes: saved and peak as an accelerator's allocator sees them, rounded up to its
        blocks; None on a CPU and where the allocator keeps no statistics.
    backward_input_seconds: of the backward for the inputs alone; None unless it was asked for, and where it cannot be
        done alone: one operation gives all gradients, as that of an LSTM, or those of a parameter add up. Figures of
        both parts may add up to more than the backward in one go.
    passing_bytes: of its output, what its own backward does not need. It stays where a layer behind saves it.
    freed_bytes: of what passes, what is gone once this layer has run, because it does not need that either.
    backward_peak_bytes: the peak of its backward without what passes; None where nothing was counted.
    adding_peak_bytes: the same without the gradients of parameters that have been added to those of an earlier
        micro-batch.
    parting_bytes: of the gradients inside it that the rest of the backward starts from, if the part for the inputs is
        done alone; None as ``backward_input_seconds``.
    parting_peak_bytes: the peak of the part for the inputs, beside what the forward saved.
    largest_parameter_bytes: of the largest of its trainable parameters.
    given_peak_bytes, adding_given_peak_bytes: ``backward_peak_bytes`` and ``adding_peak_bytes`` without the gradient of
        the output, where that is in memory of another stage.
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
    allocated_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    backward_input_seconds: float | None = None
    passing_bytes: int = 0
    freed_bytes: int = 0
    backward_peak_bytes: int | None = None
    adding_peak_bytes: int | None = None
    parting_bytes: int | None = None
    parting_peak_bytes: int | None = None
    largest_parameter_bytes: int | None = None
    given_peak_bytes: int | None = None
    adding_given_peak_bytes: int | None = None

    @property
    def backward_weight_seconds(self) -> float | None:
        """The rest of the backward, for which no stage waits; None if the part for the inputs was not measured."""
        if self.backward_seconds is None or self.backward_input_seconds is None:
            return None
        return max(0.0, self.backward_seconds - self.backward_input_seconds)

    @property
    def seconds(self) -> float | None:
        """Forward plus backward."""
        if self.forward_seconds is None or self.backward_seconds is None:
            return None
        return self.forward_seconds + self.backward_seconds

    @property
    def parameter_bytes(self) -> int:
        """Trainable and frozen."""
        return self.trainable_bytes + self.frozen_bytes


@dataclass(frozen=True)
class SkipProfile:
    """A tensor of one micro-batch that skips layers.

    source, target: the numbers of the layers that stash it and pop it.
    bytes: of it.
    """

    source: int
    target: int
    bytes: int


COSTS = ("seconds", "parameter_bytes", "backward_weight_seconds", *(field.name for field in fields(LayerProfile)[2:]))


@dataclass(frozen=True)
class ProfileData:
    """The layers of a Sequential in order, and under which conditions they were profiled."""

    layers: tuple[LayerProfile, ...]
    device: str
    torch: str
    threads: int
    chunks: int
    rows: int
    rounds: int
    loss: LayerProfile | None = None
    others: tuple[ProfileData, ...] = ()
    skips: tuple[SkipProfile, ...] = ()

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerProfile]:
        return iter(self.layers)

    @overload
    def __getitem__(self, layer: SupportsIndex | str) -> LayerProfile: ...

    @overload
    def __getitem__(self, layer: slice) -> tuple[LayerProfile, ...]: ...

    def __getitem__(self, layer: SupportsIndex | str | slice) -> LayerProfile | tuple[LayerProfile, ...]:
        return self.layers[self._index(layer) if isinstance(layer, str) else layer]

    def _index(self, name: str) -> int:
        try:
            return self.names.index(name)
        except ValueError:
            raise KeyError(f"no layer {name!r} in this profile; it has {', '.join(self.names)}") from None

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    @property
    def seconds(self) -> list[float]:
        """Forward plus backward of each layer."""
        return self.costs("seconds")

    def costs(self, by: str) -> list[float]:
        """One figure of every layer, to balance or to draw: ``"seconds"``, ``"saved_bytes"``, ``"flops"``, …

        Args:
            by: the name of a figure.

        Returns:
            One number a layer, in seconds, bytes or operations.

        Raises:
            ValueError: another name, or a figure that was not measured.
        """
        if by not in COSTS:
            raise ValueError(f"by: expected one of {', '.join(COSTS)}, got {by!r}")
        costs = [getattr(layer, by) for layer in self.layers]
        if None in costs:
            raise ValueError(f"by: this profile has no {by}, as it was made on device {self.device!r}")
        return costs
