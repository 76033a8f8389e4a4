"""What a stage holds of which some layers are computed again: that of its pieces, one after the other.

::

    forward i      piece 0, piece 1, piece 2
    backward i     piece 2, piece 1 again and back, piece 0         (of which piece 1 is computed again)

Between them a piece that is computed again keeps its input alone, which is what the piece before has sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from profiler import LayerProfile

from ..schedule import Kind
from ..schedule._flags import runs_of
from ._memory import Surroundings, WholeStage, parting_of
from ._moments import Moment


class StageInPieces:
    """The sums and peaks over the pieces of a stage.

    Args:
        layers: of the stage, on a micro-batch.
        around: what it depends on beside.
        flags: for each layer whether it is computed again.

    Attributes:
        parameters, gradients: bytes.
    """

    def __init__(self, layers: Sequence[LayerProfile], around: Surroundings, flags: Sequence[bool]) -> None:
        self._whole = WholeStage(layers, around)
        self._pieces = [_Piece(layers, around, *piece) for piece in runs_of(flags)]
        self._copy = around.incoming if around.copied else 0
        self._held = [0, *accumulate(piece.held for piece in self._pieces)]
        self._late = sum(piece.parted for piece in self._pieces)
        self._known: dict[tuple[Kind, bool], tuple[int, int]] = {}
        self.parameters, self.gradients = self._whole.parameters, self._whole.gradients

    def peak(self, kind: Kind, begun: bool) -> tuple[int, int]:
        """See :class:`gpipe._plan._memory.Stage`."""
        if (kind, begun) not in self._known:
            self._known[kind, begun] = max(self._peaks(kind, begun), key=sum, default=(0, 0))
        return self._known[kind, begun]

    def others(self, moment: Moment) -> tuple[int, int, int]:
        """See :class:`gpipe._plan._memory.Stage`."""
        _, loss, crossing = self._whole.others(moment)
        beside = moment.whole * (self._held[-1] + self._copy) + moment.late * (self._late + self._copy)
        # Of what is computed again the loss is too.
        return beside + self._whole.sent_twice(moment), 0 if self._pieces[-1].again else loss, crossing

    def _peaks(self, kind: Kind, begun: bool) -> Iterator[tuple[int, int]]:
        """Of each piece, beside what the others hold; the last one comes first in a backward."""
        splits = kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        made, late = 0, 0
        for p, piece in reversed([*enumerate(self._pieces)]):
            there = self.gradients if begun else made
            before = sum(each.late for each in self._pieces[:p]) if kind == Kind.BACKWARD_WEIGHT else self._held[p]
            beside = self._copy + before + late + piece.flowing
            if kind == Kind.FORWARD:
                yield there, self._copy + before + piece.stage.peak(kind, begun)[1]
                continue
            if piece.again and kind != Kind.BACKWARD_WEIGHT:
                # The gradient of what it sent is there already, or what it sent if the next stage still needs it.
                yield there, beside + piece.stage.peak(Kind.FORWARD, begun)[1] + piece.sent
            left = piece.waiting if splits else piece.left
            if kind == Kind.BACKWARD_WEIGHT and not piece.stage.gradients:
                continue
            for k, (gradients, taken) in enumerate(piece.stage.peaks(kind, begun)):
                # The part for the inputs begins with the last layer, whose peak has the gradient of its output.
                arrived = piece.arrived if kind == Kind.BACKWARD_INPUT and k == 0 else 0
                yield there if begun else made + gradients, beside + taken + left - arrived
            if kind == Kind.BACKWARD_INPUT:  # nothing is let go
                late += piece.late
            else:
                made += piece.stage.gradients


class _Piece:
    """A run of layers of one kind.

    Args:
        layers, around: of the stage that it is in.
        again: whether it is computed again.
        first, end: its layers in the stage.

    Attributes:
        stage: the same as a stage of its own.
        again: whether it is computed again.
        sent: what the next piece keeps of it, or the next stage.
        held: what it leaves after its forward, without the input.
        left: what the next stage keeps of it beside what was computed again.
        late: what is there of it while pieces before it do the part of their backward for the inputs.
        parted: what is there of it until the part for the weights, while the stage does something else.
        waiting: of ``late``, what the next piece holds.
        arrived: of that, the gradient of what it was sent, unless this piece holds that for the weights too.
        flowing: gradients of skips past it.
    """

    def __init__(self, layers: Sequence[LayerProfile], around: Surroundings, again: bool, first: int, end: int) -> None:
        own, is_last = layers[first:end], end == len(layers)
        inside = [(s - first, t - first, size) for s, t, size in around.inner if first <= s and t < end]
        out = [(s - first, size) for s, t, size in around.inner if first <= s < end <= t]
        away = [(s - first, size) for s, size in around.stashed if first <= s < end]
        self.again = again
        self.stage = WholeStage(
            own,
            replace(
                around,
                copied=False,
                # The gradient of what it sends to the next piece is made by that, in memory of this stage.
                is_last=around.is_last if is_last else True,
                loss=around.loss if is_last else None,
                inner=inside,
                stashed=[*out, *away],
                popped=[(t - first, size) for t, size in around.popped if first <= t < end]
                + [(t - first, size) for s, t, size in around.inner if s < first <= t < end],
            ),
        )
        shares = not around.is_last and not around.sends_copies
        # A view of what it got is nothing new.
        self.sent = min(own[-1].output_bytes, self.stage.kept) if shares or not is_last else 0
        self.sent += sum(size for _, size in out) + (sum(size for _, size in away) if shares else 0)
        # The next stage needs it until the rest of its backward is done, after this one has computed it again.
        late = shares and again and around.trailing is not None
        goes_on = not any(layer.saved_bytes for layer in layers[end:])  # all that come are views
        self.left = (self.sent if goes_on else sum(size for _, size in away)) if late else 0
        self.held = self.sent if again else self.stage.kept
        # The next piece holds what it was sent, and its gradient, to the end.
        self.arrived = 0 if is_last else max(0, own[-1].output_bytes - parting_of(own[-1]))
        self.waiting = self.arrived + (self.sent if again else 0)
        self.late = self.waiting + (self.stage.kept + self.stage.parting if self.stage.gradients else 0)
        self.parted = self.stage.kept + self.stage.parting + (self.sent if again else 0)
        self.flowing = sum(size for s, t, size in around.inner if s < first and end <= t)
        self.flowing += sum(size for t, size in around.popped if end <= t)
