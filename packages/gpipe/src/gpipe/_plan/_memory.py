"""How many bytes a stage takes at its fullest moment, by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from profiler import LayerProfile


@dataclass(frozen=True)
class DeviceBytes:
    """What a device holds at its fullest moment, in bytes.

    Attributes:
        parameters: and buffers.
        gradients: of the trainable parameters, as far as they are there at that moment.
        optimizer: its state.
        activations: of the other micro-batches in flight: all that they save, or their inputs if they are checkpointed.
        transient: what the micro-batch takes that is in its backward: what it saved, and what comes and goes.
        loss: the gradients of outputs whose backward has not begun; a loss is turned around as soon as it is there.
        inputs: the mini-batch where it was moved to the device, what protects it from layers that work in place, and
            a gradient on its way to the stage before.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    loss: int
    inputs: int

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes by what they are for."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Surroundings:
    """What a stage does, and what it has to do with its neighbours.

    Attributes:
        held: how many micro-batches it holds at most.
        refills: whether it goes on to hold as many when its gradients are there.
        mode: how it is checkpointed.
        late: under a split backward, how many micro-batches wait for the part for the weights; None if it is whole.
        incoming: bytes of a micro-batch's input.
        copied: whether that is a copy on a device of its own, rather than the output of the stage before.
        moved: bytes of the mini-batch, if it is moved to this device.
        sent: bytes of outputs that the next stage keeps, where that is not a copy and this stage keeps none.
        is_first, is_last: of all stages.
        loss: what the loss behind it costs.
    """

    held: int
    refills: bool
    mode: str
    incoming: int
    late: int | None = None
    copied: bool = False
    moved: int = 0
    sent: int = 0
    is_first: bool = False
    is_last: bool = False
    loss: LayerProfile | None = None


def stage_bytes(layers: Sequence[LayerProfile], optimizer: int, around: Surroundings) -> DeviceBytes:
    """What a stage of these layers holds at its fullest moment.

    That is in the backward of a micro-batch, at some layer: what the layers before it saved, the layer's own peak, and
    the gradient of its output. Beside it are the other micro-batches in flight. Or it is the step of the optimizer.

    Args:
        layers: of the stage, on a micro-batch.
        optimizer: bytes of its state.
        around: what it depends on beside.
    """
    parameters = sum(layer.parameter_bytes + layer.buffer_bytes for layer in layers)
    whole = sum(layer.trainable_bytes for layer in layers)
    others = around.held - 1

    def moments(others: int, gradients: int | None, leaving: int) -> list[DeviceBytes]:
        beside = _beside(layers, around, others)
        # Losses of checkpointed micro-batches are computed on what is recomputed; split backwards begin at once.
        waits = around.is_last and around.late is None and around.mode == "never"
        loss = others * layers[-1].output_bytes if waits else 0
        inputs = around.moved + _protected(around) + (0 if around.is_first else leaving * around.incoming)
        return [
            DeviceBytes(parameters, made, optimizer, beside, transient, loss, inputs)
            for made, transient in _backwards(layers, around, gradients)
        ]

    found = [DeviceBytes(parameters, whole, optimizer, 0, 0, 0, 0)]
    found += moments(others, whole if around.refills else None, 1)
    if not around.refills and others:
        found += moments(others - 1, whole, 1)
        found += moments(0, whole, others)  # the stage before may be that late
    return max(found, key=lambda each: each.total)


def _backwards(layers: Sequence[LayerProfile], around: Surroundings, gradients: int | None) -> list[tuple[int, int]]:
    """For each layer, while the backward is there, the bytes of gradients and of the micro-batch itself.

    ``gradients`` of an earlier micro-batch are there from the beginning; if it is None those that this one has made.
    """
    latent = sum(layer.saved_bytes for layer in layers)
    before = accumulate((layer.saved_bytes for layer in layers), initial=0)
    done = accumulate((layer.trainable_bytes for layer in reversed(layers)), initial=0)
    after = list(done)[-2::-1]
    kept = around.incoming if around.copied else 0
    kept += _between(layers) if around.late is not None else 0
    # Outside of fill-drain, the last micro-batch, which keeps everything, is beside one that is recomputed.
    kept += latent if around.mode == "except_last" and around.held > 1 and around.refills else 0
    found = [
        (made if gradients is None else gradients, saved + layer.peak_bytes + layer.output_bytes + kept)
        for saved, made, layer in zip(before, after, layers, strict=False)
    ]
    if around.loss:  # turned around when all is saved
        found.append((gradients or 0, latent + around.loss.peak_bytes + kept))
    return found


def _beside(layers: Sequence[LayerProfile], around: Surroundings, others: int) -> int:
    """What the other micro-batches keep."""
    latent, kept = sum(layer.saved_bytes for layer in layers), around.incoming if around.copied else 0
    late = min(others, around.late or 0)
    one = latent + kept if around.mode == "never" else kept
    return (others - late) * one + late * (latent + kept + _between(layers)) + around.sent


def _between(layers: Sequence[LayerProfile]) -> int:
    """The gradients that the part of a backward for the weights starts from: inside of layers as large as what they
    save, at most.
    """
    return sum(max(layer.output_bytes, layer.saved_bytes) for layer in layers if layer.trainable_bytes)


def _protected(around: Surroundings) -> int:
    """A clone of the input, until it is known that the layers leave it as it is."""
    return around.incoming if around.is_first or around.mode != "never" else 0


def held_by(schedule: str, microbatches: int, stages: int, split: Sequence[int] = ()) -> list[int]:
    """How many micro-batches each stage holds at most, as :func:`gpipe.schedule.in_flight` finds.

    >>> held_by("1f1b", 8, 4), held_by("fill_drain", 8, 2)
    ([4, 3, 2, 1], [8, 8])
    """
    if schedule == "fill_drain":
        return [microbatches] * stages
    return [min(microbatches, stages if j in split else stages - j) for j in range(stages)]
