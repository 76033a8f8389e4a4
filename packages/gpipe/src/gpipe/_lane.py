"""A stage's share of one run: it takes what arrives, has a cell work on it, and sends the result on."""

from __future__ import annotations

from streams import Context

from ._cell import Cell, CheckpointedCell
from ._errors import add_note, shapes
from ._link import Channel
from ._stage import Stage
from .schedule import Action


class Lane:
    """The cells of one stage in one run, and the channels to the stages before and after.

    Args:
        checkpoint_stop: micro-batches below it are checkpointed.
        keep: whether a backward will come; if not, no cell is kept.
        context: what the caller of the forward saw, for recomputations.
    """

    def __init__(
        self, stage: Stage, arrival: Channel, departure: Channel, *, checkpoint_stop: int, keep: bool, context: Context
    ) -> None:
        self.stage = stage
        self._arrival = arrival
        self._departure = departure
        self._checkpoint_stop = checkpoint_stop if keep else 0
        self._keep = keep
        self._context = context
        self._cells: dict[int, Cell] = {}

    def do(self, action: Action) -> None:
        """Do one action of the stage's program."""
        getattr(self, action.kind)(action.microbatch)

    def forward(self, i: int) -> None:
        inputs = self._arrival.values.get(i)
        cell = self._cells[i] = self._cell(i)
        output = cell.forward(inputs)
        if not self._keep:
            del self._cells[i]
        self._departure.values.put(i, output)

    def recompute(self, i: int) -> None:
        self._cells[i].recompute()

    def backward(self, i: int) -> None:
        gradients = self._cells[i].backward(self._departure.gradients.get(i))
        del self._cells[i]
        self._arrival.gradients.put(i, gradients)

    def annotate(self, error: BaseException, action: Action, microbatches: int) -> None:
        """Say in a note on ``error`` which cell it comes from."""
        cell = self._cells.get(action.microbatch)
        stage = self.stage
        add_note(
            error,
            f"in partition {stage.index} (layers {stage.layers}) on {stage.device}, micro-batch {action.microbatch} of "
            f"{microbatches}, {action.kind}; input: {shapes(cell and cell.inputs.value)}",
        )

    def _cell(self, i: int) -> Cell:
        return CheckpointedCell(self.stage, self._context) if i < self._checkpoint_stop else Cell(self.stage)
