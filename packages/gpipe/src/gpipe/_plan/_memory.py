"""The bytes of a stage at its peak, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, takewhile
from typing import Protocol

from profiler import LayerProfile

from ..schedule import Kind
from ..timeline._kept import freed, kept_bytes
from ._moments import Moment


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of a device at its peak, by kind.

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the trainable parameters that exist at that time.
        optimizer: the state of the optimizer.
        activations: of the other micro-batches in flight: all that they save, or their inputs if they are checkpointed.
        transient: the micro-batch that is in its backward: what it saved, and temporary memory.
        loss: the gradients of outputs whose backward has not begun; a loss is turned around as soon as it is there.
        inputs: the mini-batch where it was moved to the device, a clone that protects it from layers that work in
            place, its gradient, or one on its way to the stage before.
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
        """The sum of all kinds."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes by kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Surroundings:
    """A stage's exchange with its neighbours; all bytes are those of a micro-batch.

    Attributes:
        microbatches: how many there are.
        incoming: bytes of the input, with skips from other stages.
        stashed: skips to other stages: the number of the layer that stashes it, and bytes.
        inner: skips inside of the stage: the numbers in it of the layers that stash and pop them, and bytes.
        popped: skips from other stages: the number of the layer that pops it, and bytes.
        copied: whether the input is a copy on a device of its own, rather than the output of the stage before.
        sends_copies: the same of the output, and the next stage.
        moved: bytes of the mini-batch, if it is moved to this device.
        trailing: how many micro-batches the next stage still holds that are done here, as its backward is split; None
            if it is whole.
        drains: whether it does all forwards first, so that gradients may pile up before a slower stage.
        is_first, is_last: of all stages.
        needs_gradient: whether the mini-batch does, if this is the first stage.
        loss: what the loss behind it costs.
    """

    microbatches: int
    incoming: int
    stashed: Sequence[tuple[int, int]] = ()
    inner: Sequence[tuple[int, int, int]] = ()
    popped: Sequence[tuple[int, int]] = ()
    copied: bool = False
    sends_copies: bool = False
    moved: int = 0
    trailing: int | None = None
    drains: bool = False
    is_first: bool = False
    is_last: bool = False
    needs_gradient: bool = False
    loss: LayerProfile | None = None


class Stage(Protocol):
    """The memory of a stage: a whole one, or one in pieces.

    Attributes:
        parameters, gradients: bytes.
    """

    parameters: int
    gradients: int

    def peak(self, kind: Kind, begun: bool) -> tuple[int, int]:
        """The bytes of gradients, and of the micro-batch of an action, at the peak of that action.

        Args:
            kind: of the action.
            begun: whether gradients of an earlier micro-batch are there.
        """

    def others(self, moment: Moment) -> tuple[int, int, int]:
        """The further bytes at that time: other micro-batches, their losses, and values from and to other stages."""


def stage_bytes(stage: Stage, optimizer: int, moments: Iterable[Moment]) -> DeviceBytes:
    """The bytes of a stage at its peak.

    Args:
        stage: its layers.
        optimizer: bytes of its state.
        moments: what it does, beside which other micro-batches.
    """
    fixed = stage.parameters, stage.gradients, optimizer
    most, peak, fullest = sum(fixed), (stage.gradients, 0), None
    for moment in moments:
        gradients, transient = stage.peak(moment.kind, moment.begun)
        taken = stage.parameters + gradients + optimizer + transient + sum(stage.others(moment))
        if taken > most:
            most, peak, fullest = taken, (gradients, transient), moment
    beside, loss, crossing = (0, 0, 0) if fullest is None else stage.others(fullest)
    return DeviceBytes(stage.parameters, peak[0], optimizer, beside, peak[1], loss, crossing)


class WholeStage:
    """The sums and peaks over the layers of a stage.

    Args:
        layers: of the stage, on a micro-batch.
        around: what it depends on beside.

    Attributes:
        parameters, gradients: bytes.
        kept: what a micro-batch leaves after its forward, without the input.
        parting: what waits with it for the part of its backward for the weights.
        sent: of that, what the next stage keeps too, if it is in memory of this one.
    """

    def __init__(self, layers: Sequence[LayerProfile], around: Surroundings) -> None:
        self._layers = layers
        self._around = around
        self.kept = kept_bytes(layers)
        self._copy = around.incoming if around.copied else 0
        self.parting = sum(map(parting_of, layers))
        self._shares = not around.is_last and not around.sends_copies
        # What the next stage keeps of the output, in memory of this one.
        self.sent = layers[-1].output_bytes + sum(size for _, size in around.stashed) if self._shares else 0
        self.parameters = sum(layer.parameter_bytes + layer.buffer_bytes for layer in layers)
        self.gradients = sum(layer.trainable_bytes for layer in layers)
        self._freed = freed(layers)
        saved = accumulate((layer.saved_bytes for layer in layers), initial=0)
        # The graph of what comes before a layer, without what that layer has let go of.
        self._before = [made - gone for made, gone in zip(saved, accumulate(self._freed), strict=False)]
        behind = takewhile(_hands_on, reversed(layers[1:]))
        self._turn = len(layers) - 1 - len(list(behind))
        self._known: dict[tuple[Kind, bool], tuple[int, int]] = {}

    def peak(self, kind: Kind, begun: bool) -> tuple[int, int]:
        """See :class:`Stage`."""
        if (kind, begun) not in self._known:
            self._known[kind, begun] = max(self.peaks(kind, begun), key=sum)
        return self._known[kind, begun]

    def others(self, moment: Moment) -> tuple[int, int, int]:
        """See :class:`Stage`."""
        loss = moment.whole * self._layers[-1].output_bytes if self._around.is_last else 0
        return self._beside(moment), loss, self._crossing(moment)

    def _beside(self, moment: Moment) -> int:
        """The bytes that the other micro-batches keep."""
        whole = self.kept + self._copy
        held = moment.whole * whole + moment.late * (whole + self.parting) + moment.bare * self._copy
        return held + self.sent_twice(moment)

    def sent_twice(self, moment: Moment) -> int:
        """What the next stage keeps of outputs that this one does not, or has computed again."""
        return self._twice(moment) * self.sent

    def _twice(self, moment: Moment) -> int:
        again = moment.bare + (moment.kind == Kind.RECOMPUTE)
        if self._around.trailing is None:
            return again
        done = self._around.microbatches - 1 - moment.whole - moment.bare - moment.late
        trailing = min(self._around.trailing, done) if moment.begun else 0
        return trailing + (moment.bare + moment.late + 1 if moment.checkpointed else again)

    def _crossing(self, moment: Moment) -> int:
        """The mini-batch, and gradients on their way to where the inputs come from."""
        around = self._around
        begun = moment.begun or moment.late > 0
        done = around.microbatches - 1 - moment.whole - moment.bare if begun else 0
        if not around.is_first:
            return (done if around.drains else begun) * around.incoming
        # Of the first one a clone was made, before it was known that the layers leave it as it is.
        return around.moved + (moment.first + (done if around.needs_gradient else 0)) * around.incoming

    def peaks(self, kind: Kind, begun: bool) -> list[tuple[int, int]]:
        """Of which :meth:`peak` is one; of a backward for each layer."""
        there = self.gradients if begun else 0
        if kind == Kind.BACKWARD:
            return self._backward(begun)
        if kind == Kind.BACKWARD_INPUT:
            return self._inputs(there)
        if kind == Kind.BACKWARD_WEIGHT:
            return self._weights(begun)
        return [(there, self._forward() + self._copy)]

    def _forward(self) -> int:
        found = self.kept + (self._around.loss.peak_bytes if self._around.loss else 0)
        for before, gone, layer in zip(self._before, self._freed, self._layers, strict=True):
            if layer.peak_bytes > _backward_peak(layer, begun=False):  # so it is that of the forward
                found = max(found, before + gone + layer.peak_bytes)
        return found

    def _backward(self, begun: bool) -> list[tuple[int, int]]:
        """For each layer, while its backward is there."""
        # Gradients of the layers behind have been made.
        made = list(accumulate((layer.trainable_bytes for layer in reversed(self._layers)), initial=0))[-2::-1]
        return [
            (self.gradients if begun else made[k], self._before[k] + self._peak_of(layer, k, begun) + self._flowing(k))
            for k, layer in enumerate(self._layers)
        ]

    def _peak_of(self, layer: LayerProfile, k: int, begun: bool) -> int:
        """The peak of its backward; the gradient that this begins with may be in memory of the next stage."""
        whole = _backward_peak(layer, begun)
        given = layer.adding_given_peak_bytes if begun else layer.given_peak_bytes
        if given is None or k < self._turn:
            return whole
        if given + layer.output_bytes > whole:  # at a moment when it needs neither that gradient nor what it gave
            held = layer.output_bytes - layer.passing_bytes if k == len(self._layers) - 1 else 0
            return max(given if self._shares else whole, given + held + (0 if self._shares else layer.output_bytes))
        return given if self._shares else whole

    def _flowing(self, k: int) -> int:
        """What is there beside the graph while the backward of a layer runs."""
        around, last = self._around, len(self._layers) - 1
        # The cell holds what it got and gave, from the beginning to the end.
        given = self._layers[last].output_bytes if k < last else self._layers[k].passing_bytes
        given += sum(size for source, size in around.stashed if k < source)
        return self._copy + given + self._seed(k) + self._skips(k)

    def _seed(self, k: int) -> int:
        """The gradient of the output, which is held to the end, beside what the peak of a layer has of it.

        It is in memory of the next stage if there is one.
        """
        return self._layers[-1].output_bytes if self._around.is_last and k < self._turn else 0

    def _skips(self, k: int) -> int:
        """Gradients of skips that have been made and not been used."""
        inner = sum(size for source, target, size in self._around.inner if source < k < target)
        return inner + sum(size for target, size in self._around.popped if k < target)

    def _inputs(self, gradients: int) -> list[tuple[int, int]]:
        """For each layer, while the part of its backward for the inputs is there, and nothing saved is let go."""
        left, found = 0, []
        for k, layer in enumerate(self._layers[::-1], start=1 - len(self._layers)):
            peak = (
                parting_of(layer) + layer.output_bytes if layer.parting_peak_bytes is None else layer.parting_peak_bytes
            )
            found.append((gradients, self.kept + self._copy + left + peak + self._skips(-k)))
            left += parting_of(layer)
        return found

    def _weights(self, begun: bool) -> list[tuple[int, int]]:
        made, rest, found = 0, self.parting, []
        for layer in self._layers:
            if layer.trainable_bytes:
                # They come one after the other, and go where there are some to add them to.
                largest = layer.largest_parameter_bytes if begun else None
                fresh = layer.trainable_bytes if largest is None else largest
                found.append((self.gradients if begun else made, self.kept + self._copy + rest + fresh))
            made, rest = made + layer.trainable_bytes, rest - parting_of(layer)
        return found or [(0, self.kept + self._copy)]


def _hands_on(layer: LayerProfile) -> bool:
    """Whether the gradient of the output is that of the input, as of a view."""
    return layer.backward_peak_bytes is not None and layer.backward_peak_bytes <= layer.output_bytes


def _backward_peak(layer: LayerProfile, begun: bool) -> int:
    """Where a layer was not counted, as if it needed the gradient of its output to the end."""
    found = layer.adding_peak_bytes if begun else layer.backward_peak_bytes
    return layer.peak_bytes + layer.output_bytes if found is None else found


def parting_of(layer: LayerProfile) -> int:
    """The gradients that the part of a backward for the weights starts from.

    Where they were not counted they are inside of layers as large as what these save, at most.
    """
    if layer.parting_bytes is not None:
        return layer.parting_bytes
    return max(layer.output_bytes, layer.saved_bytes) if layer.trainable_bytes else 0


def held_by(schedule: str, microbatches: int, stages: int, split: Sequence[int] = ()) -> list[int]:
    """How many micro-batches each stage holds at most, as :func:`gpipe.schedule.in_flight` finds.

    >>> held_by("1f1b", 8, 4), held_by("fill_drain", 8, 2)
    ([4, 3, 2, 1], [8, 8])
    """
    if schedule == "fill_drain":
        return [microbatches] * stages
    return [min(microbatches, stages if j in split else stages - j) for j in range(stages)]
