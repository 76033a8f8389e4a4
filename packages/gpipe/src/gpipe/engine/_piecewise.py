"""A partition in pieces: the schedule treats it as one stage, and each piece has cells of its own.

::

    forward i      piece 0, piece 1, piece 2
    backward i     piece 2, piece 1 again and back, piece 0         (piece 1 is checkpointed)

So a checkpointed piece keeps only its input, and two such pieces never have their graphs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import nn

from .._current import current
from ..schedule import Action, Kind
from ._facts import StageFacts
from ._failed_cell import failed_cell, mark
from ._stage import Stage, first_to_last
from ._stage_runner import ACTIONS, StageRunner

T = TypeVar("T")


class WholeStage:
    """A partition in pieces, with the attributes of one stage.

    Args:
        pieces: the stages of the pieces, in order.

    Attributes:
        partition: the number of the partition.
        device: the device of all pieces.
        on_accelerator: whether its work is queued on streams.
    """

    def __init__(self, pieces: Sequence[Stage]) -> None:
        self._pieces = pieces
        self.partition = pieces[0].partition
        self.device = pieces[0].device
        self.on_accelerator = pieces[0].on_accelerator
        self._module = nn.Sequential()
        for piece in pieces:
            self._module._modules.update(piece.module.named_children())

    @property
    def module(self) -> nn.Sequential:
        """The layers of all pieces."""
        self._module.training = self._pieces[0].module.training
        return self._module

    @property
    def facts(self) -> StageFacts:
        """The facts of the first piece whose backward could not be split, or of the first piece."""
        return next((piece.facts for piece in self._pieces if piece.facts.runs_whole), self._pieces[0].facts)

    @property
    def layers(self) -> str:
        """The names of the first and the last layer."""
        return first_to_last([name for name, _ in self._module.named_children()])


def whole_stages(stages: Sequence[Stage]) -> list[Stage | WholeStage]:
    """One object for each partition: its stage, or a :class:`WholeStage` of its pieces."""
    groups = _by_partition(stages, lambda stage: stage)
    return [pieces[0] if len(pieces) == 1 else WholeStage(pieces) for pieces in groups.values()]


class PiecewiseRunner(StageRunner):
    """Does each action of a partition piece by piece.

    Args:
        pieces: the runners of the pieces, in order.

    Attributes:
        stage: all pieces as one stage.
    """

    def __init__(self, pieces: Sequence[StageRunner]) -> None:
        self.stage = WholeStage([piece.stage for piece in pieces])  # type: ignore[assignment]
        self._pieces = pieces
        self._at = pieces[0]

    @property
    def mixed(self) -> int:  # type: ignore[override]
        """The number of micro-batches that may have added to gradients that were in ``.grad`` before the run."""
        return max(piece.mixed for piece in self._pieces)

    def do(self, action: Action) -> None:
        """Do one action of the partition. A checkpointed piece is recomputed just before its backward."""
        forwards = action.kind is Kind.FORWARD
        if action.kind is Kind.RECOMPUTE:
            return
        begins = action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        for piece in self._pieces if forwards else reversed(self._pieces):
            self._at = piece
            if begins:
                self._begin(action)
                piece.recompute(action.microbatch)
            self._begin(action)
            ACTIONS[action.kind](piece, action.microbatch)

    def _begin(self, action: Action) -> None:
        current.microbatch = action.microbatch

    def look_for_hooks(self) -> None:
        for piece in self._pieces:
            piece.layers.look_for_hooks()

    def annotate(self, error: BaseException, action: Action) -> None:
        """Add a note that names the piece that has failed to ``error``."""
        self._at.annotate(error, action)
        cell = failed_cell(error)
        if cell is not None:
            stages = [piece.stage for piece in self._pieces]
            flags = tuple(bool(stage.recomputed) for stage in stages for _ in stage.numbers)
            mark(error, cell._replace(first=stages[0].numbers.start, end=stages[-1].numbers.stop, flags=flags))


def joined(runners: Sequence[StageRunner]) -> dict[int, StageRunner]:
    """A runner for each partition, by its number."""
    groups = _by_partition(runners, lambda runner: runner.stage)
    return {j: own[0] if len(own) == 1 else PiecewiseRunner(own) for j, own in groups.items()}


def _by_partition(pieces: Iterable[T], stage_of: Callable[[T], Stage]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for piece in pieces:
        found.setdefault(stage_of(piece).partition, []).append(piece)
    return found
