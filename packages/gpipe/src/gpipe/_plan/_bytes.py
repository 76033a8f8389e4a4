"""The account of bytes: what is alive during the actions of a stage, times the bytes of its layers.

The order of a stage's actions says how many other micro-batches it holds during each of them, and what of them: all
that they saved, their inputs alone, or what the backward for the weights still needs. That does not depend on how long
actions take. The micro-batch of the action itself is followed layer by layer. The account leaves out what only the
engine knows (which memory is shared, when a gradient is dropped): :mod:`gpipe._plan._rehearse` runs the chosen plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from profiler import LayerProfile

from ..schedule import Kind
from ..schedule._flags import StageMode, runs_of
from ..schedule._named import lanes
from ..timeline._kept import freed, kept_bytes


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of a device at its peak, by kind.

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the trainable parameters that exist at that time.
        optimizer: the state of the optimizer.
        activations: of the other micro-batches in flight: all that they save, or their inputs if they are checkpointed,
            and the gradients of their outputs, which the loss leaves as soon as it is there.
        transient: the micro-batch that is in its backward: what it saved, and temporary memory; the mini-batch where it
            was moved to the device; and gradients on their way to the stage before.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes by kind."""
        return asdict(self)


class Moment(NamedTuple):
    """An action of a stage, and the other micro-batches that it holds meanwhile.

    Attributes:
        kind: of the action.
        begun: whether there are gradients of an earlier micro-batch.
        whole: how many others hold all that they saved.
        bare: how many hold their inputs only.
        late: how many wait for the part of their backward for the weights.
        done: how many may be through.
    """

    kind: Kind
    begun: bool
    whole: int
    bare: int
    late: int
    done: int


@lru_cache(maxsize=4096)
def moments(schedule: str, mode: str, microbatches: int, stages: int, stage: int, split: bool) -> tuple[Moment, ...]:
    """The moments at which a stage may hold the most.

    Schedules repeat themselves, so a few micro-batches show all of them; under fill-drain those that were left out are
    held from the beginning to the end.

    Args:
        schedule: its name.
        mode: how the stage is checkpointed.
        microbatches, stages: how many there are.
        stage: its number.
        split: whether its backward is.

    >>> for moment in sorted(moments("1f1b", "never", 8, 2, 0, False)):
    ...     print(moment.kind, moment.begun, moment.whole)
    backward False 1
    backward True 1
    forward False 1
    forward True 1
    """
    drains = schedule == "fill_drain"
    few = min(microbatches, 3 if drains else 2 * stages + 2)
    stop = {"never": 0, "except_last": few - 1, "always": few}[mode]
    more = microbatches - few if drains else 0
    order = (action for _, action in lanes(schedule, few, range(stages), stop, None if split else ())[stage])
    every = list(_moments(order, stop, (more, 0) if mode == "never" else (0, more)))
    # As many as there may be at the end, which makes moments alike. Gradients may pile up before a slower stage.
    every = [each._replace(done=microbatches - 1 if each.begun else 0) for each in every]
    if drains:
        every = [each._replace(done=max(0, each.done - each.whole - each.bare)) for each in every]
        every += [each._replace(whole=0, bare=0, done=microbatches - 1) for each in every if each.begun]
    return _most(every)


def _moments(order: Iterable[tuple[Kind, int]], stop: int, before: tuple[int, int]) -> Iterator[Moment]:
    """All moments of a stage that holds ``before`` already: micro-batches as a whole, and bare ones."""
    whole, bare, late, done = set[int](), set[int](), set[int](), 0
    for kind, i in order:
        for each in (whole, bare, late):
            each.discard(i)
        yield Moment(kind, done > 0, len(whole) + before[0], len(bare) + before[1], len(late), done)
        done += kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        if kind == Kind.RECOMPUTE or (kind == Kind.FORWARD and i >= stop):
            whole.add(i)
        elif kind == Kind.FORWARD:
            bare.add(i)
        elif kind == Kind.BACKWARD_INPUT:
            late.add(i)


def _most(found: Iterable[Moment]) -> tuple[Moment, ...]:
    """Without those that another one of the same kind covers."""
    kept: list[Moment] = []
    for moment in sorted(set(found), key=lambda each: -sum(each[2:])):
        if not any(all(a >= b for a, b in zip(rival[2:], moment[2:], strict=True)) and rival[:2] == moment[:2]
                   for rival in kept):  # fmt: skip
            kept.append(moment)
    return tuple(kept)


class Surroundings(NamedTuple):
    """What a stage exchanges with others; all bytes are those of a micro-batch.

    Attributes:
        incoming: bytes of the input, with skips from other stages.
        skips: what layers hand on past others: the layers in the stage that stash and pop it, and bytes.
        copied: whether the input is a copy on a device of its own, rather than the output of the stage before.
        moved: bytes of the mini-batch, if it is moved to this device.
        returned: of how many micro-batches gradients are on their way back: of all that are done here, of one, or none.
        loss: of the loss behind the stage, if it is the last one.
        turned: bytes of the gradient with which the backward of the last stage begins.
        sent: bytes of the output that the next stage keeps in memory of this one.
    """

    incoming: int
    skips: Sequence[tuple[int, int, int]] = ()
    copied: bool = False
    moved: int = 0
    returned: str = "none"
    loss: LayerProfile | None = None
    turned: int = 0
    sent: int = 0


class StageBytes:
    """The bytes of a stage: those of its parameters, those that a micro-batch keeps, and the peak of each action.

    Args:
        layers: of the stage, on a micro-batch.
        mode: how it is checkpointed, or for each layer whether its backward computes it again.
        around: what it exchanges with others.
        tied: bytes of parameters, and of their gradients, that it has a copy of.
        optimizer: bytes of its state.
    """

    def __init__(
        self, layers: Sequence[LayerProfile], mode: StageMode, around: Surroundings, tied: tuple[int, int],
        optimizer: int,
    ) -> None:  # fmt: skip
        self._layers, self._around, self._optimizer = layers, around, optimizer
        self._tied = tied[1]
        self.parameters = tied[0] + sum(layer.parameter_bytes + layer.buffer_bytes for layer in layers)
        self.gradients = tied[1] + sum(layer.trainable_bytes for layer in layers)
        self._copy = around.incoming if around.copied else 0
        self._waiting = [_parting(layer) for layer in layers]
        flags = (False,) * len(layers) if isinstance(mode, str) else mode
        self._pieces = [(again, first, end) for again, first, end in runs_of(flags)]
        self._graph = [0] * len(layers)  # what layers before this one keep when its backward runs
        self._computed = 0  # the most while forwards run
        self.kept = 0
        for again, first, end in self._pieces:
            self._enter(again, first, end)
        self._known: dict[tuple[Kind, bool], tuple[int, int]] = {}

    def _enter(self, again: bool, first: int, end: int) -> None:
        """Add a run of layers, behind what those before it keep."""
        own = self._layers[first:end]
        saved = accumulate((layer.saved_bytes for layer in own), initial=self.kept)
        gone = list(accumulate(freed(own)))
        for k, (made, lost) in enumerate(zip(saved, gone, strict=False)):
            self._graph[first + k] = made - lost
            layer, before = own[k], made - (gone[k - 1] if k else 0)
            if layer.peak_bytes > _backward_peak(layer, begun=False):  # so it is that of the forward
                self._computed = max(self._computed, before + layer.peak_bytes)
        whole = kept_bytes(own)
        self._computed = max(self._computed, self.kept + whole + (own[-1].output_bytes if again else 0))
        stashed = sum(size for source, target, size in self._around.skips if first <= source < end <= target)
        self.kept += min(own[-1].output_bytes + stashed, whole) if again else whole

    def at_peak(self, found: Iterable[Moment]) -> DeviceBytes:
        """The bytes at the fullest of some moments."""
        every = [self._empty, *map(self._during, found)]
        return DeviceBytes(*max(every, key=sum))

    @property
    def _empty(self) -> tuple[int, ...]:
        return self.parameters, self.gradients, self._optimizer, 0, 0

    def _during(self, moment: Moment) -> tuple[int, ...]:
        """The bytes by kind, as in :class:`DeviceBytes`."""
        around, whole = self._around, self.kept + self._copy
        again = moment.bare + (moment.kind == Kind.RECOMPUTE)
        beside = moment.whole * whole + moment.bare * self._copy + again * around.sent
        beside += moment.late * (whole + sum(self._waiting)) if moment.late else 0
        returned = {"all": moment.done, "one": int(moment.begun), "none": 0}[around.returned]
        gradients, transient = self.peak(moment.kind, moment.begun)
        beside += around.turned * moment.whole
        return (
            self.parameters,
            gradients,
            self._optimizer,
            beside,
            transient + around.moved + returned * around.incoming,
        )

    def peak(self, kind: Kind, begun: bool) -> tuple[int, int]:
        """The bytes of gradients, and of the micro-batch of an action, at the peak of that action.

        Args:
            kind: of the action.
            begun: whether gradients of an earlier micro-batch are there.
        """
        if (kind, begun) not in self._known:
            self._known[kind, begun] = max(self._peaks(kind, begun), key=sum)
        return self._known[kind, begun]

    def _peaks(self, kind: Kind, begun: bool) -> Iterator[tuple[int, int]]:
        made = self.gradients if begun else self._tied
        loss = self._around.loss.peak_bytes if self._around.loss else 0
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            yield self.gradients if begun else 0, self._copy + max(self._computed, self.kept + loss)
            return
        late = self._copy + self.kept + sum(self._waiting)
        waited = 0  # between the parts of this backward
        for k in reversed(range(len(self._layers))):
            layer = self._layers[k]
            if kind == Kind.BACKWARD:
                yield made, self._graph[k] + _backward_peak(layer, begun) + self._flowing(k)
            elif kind == Kind.BACKWARD_INPUT:
                peak = layer.parting_peak_bytes
                peak = self._waiting[k] + layer.output_bytes if peak is None else peak
                yield made, self._copy + max(self.kept, self._computed) + waited + peak + self._skipping(k)
                waited += self._waiting[k]
            else:
                largest = layer.largest_parameter_bytes if begun else None
                yield made, late + (layer.trainable_bytes if largest is None else largest)
                late -= self._waiting[k]
            if not begun and kind != Kind.BACKWARD_INPUT:
                made += layer.trainable_bytes

    def _flowing(self, k: int) -> int:
        """What there is beside the graph while the backward of a layer runs: the input, the output, and gradients."""
        last = len(self._layers) - 1
        given = self._layers[last].output_bytes if k < last else self._layers[k].passing_bytes
        return self._copy + given + (self._around.turned if k < last else 0) + self._skipping(k)

    def _skipping(self, k: int) -> int:
        """Gradients of skips that have been made and not been used."""
        return sum(size for source, target, size in self._around.skips if source < k < target < len(self._layers))


def _backward_peak(layer: LayerProfile, begun: bool) -> int:
    """Where a layer was not counted, as if it needed the gradient of its output to the end."""
    found = layer.adding_peak_bytes if begun else layer.backward_peak_bytes
    return layer.peak_bytes + layer.output_bytes if found is None else found


def _parting(layer: LayerProfile) -> int:
    """The gradients that the part of a backward for the weights starts from.

    Where they were not counted they are inside of layers as large as what these save, at most.
    """
    if layer.parting_bytes is not None:
        return layer.parting_bytes
    return max(layer.output_bytes, layer.saved_bytes) if layer.trainable_bytes else 0
