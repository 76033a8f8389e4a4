"""A stage's share of one run: it takes what arrives, has a cell work on it, and sends the result on."""

from __future__ import annotations

import torch

from streams import Context, add_note

from .._batchnorm import MiniBatchStatistics
from .._current import At, place
from ..checkpoint._random import CellRandom, RunRandom, Unwatched
from ..schedule import Action
from ..transport._ports import Port, Ports
from ..values._describe import shapes
from ..values._sharing import owned
from ._accumulate import Grown
from ._cell import Cell, CheckpointedCell, Circumstances
from ._deferred_gradients import HeldGradients
from ._graph_leaves import Below
from ._loss import LossEnd
from ._stage import Stage

_HIDES = (
    "someone (DistributedDataParallel?) has hooks where autograd accumulates the gradients of these parameters, "
    "which must be whole then; but the layers use torch.utils.checkpoint with use_reentrant=True, or contain a pipe, "
    "whose backward accumulates micro-batch by micro-batch; use use_reentrant=False"
)


class Lane:
    """The cells of one stage in one run, and the ports to the stages before and after.

    Args:
        microbatches: how many there are.
        checkpoint_stop: micro-batches below it are checkpointed.
        keep: whether a backward will come; if not, no cell is kept.
        context: what the caller of the forward saw, for recomputations.
        random: where the random numbers of the run come from.
        held: takes care of leaves whose gradients grow out of sight, of all stages.
        grown: where gradients accumulate that must not go to ``.grad`` before they are whole; None if they may.
        end: where micro-batches turn around, if they do so inside the run.

    Attributes:
        mixed: how many micro-batches may have added to gradients that were there before the run.
    """

    def __init__(
        self,
        stage: Stage,
        arrival: Port | Ports,
        departure: Port | Ports | LossEnd,
        *,
        microbatches: int,
        checkpoint_stop: int,
        keep: bool,
        context: Context,
        random: RunRandom,
        held: HeldGradients,
        grown: Grown | None = None,
        end: LossEnd | None = None,
    ) -> None:
        self.stage = stage
        self._arrival = arrival
        self._departure = departure
        self._microbatches = microbatches
        self.mixed = 0
        self._held = held
        self._grown = grown
        self._begun = False
        self._end = end
        self._checkpoint_stop = checkpoint_stop if keep else 0
        self._keep = keep
        self._random = random
        self._circumstances = Circumstances(stage, context, random)
        self._cells: dict[int, Cell] = {}
        self._forwards = 0
        around = place()
        # A run inside a layer that is being recomputed repeats one whose statistics have been counted.
        self._statistics = MiniBatchStatistics() if around is None or around.statistics is not None else None

    def do(self, action: Action) -> None:
        """Do one action of the stage's program."""
        getattr(self, action.kind)(action.microbatch)

    def forward(self, i: int) -> None:
        inputs = self._arrival.get_values(i)
        if self.stage.may_change_input:
            inputs = owned(inputs)  # what the caller gave stays as it is, and what a recomputation needs
        cell = self._cells[i] = self._cell(i)
        with At(i, self._statistics):
            outputs = cell.forward(inputs)
        self._forwards += 1
        if self._forwards == self._microbatches:
            self._finish_forwards()
        if not self._keep:
            del self._cells[i]
        self._departure.put_values(i, outputs)

    def _finish_forwards(self) -> None:
        self.stage.saw_all()
        if self._statistics is not None:
            self._statistics.commit()

    def recompute(self, i: int) -> None:
        self.stage.expect_current()
        with At(i):
            self._cells[i].recompute()

    def backward(self, i: int) -> None:
        seeds = self._departure.get_gradients(i)
        self._hold(i)
        with At(i):
            gradients = self._cells[i].backward(seeds, self._grown)
        del self._cells[i]
        self._arrival.put_gradients(i, gradients)

    def backward_input(self, i: int) -> None:
        seeds = self._departure.get_gradients(i)
        self._hold(i)
        with At(i):
            gradients = self._cells[i].backward_input(seeds, self._grown)
        self._arrival.put_gradients(i, gradients)

    def backward_weight(self, i: int) -> None:
        with At(i):
            self._cells[i].backward_weight(self._grown)
        del self._cells[i]

    def annotate(self, error: BaseException, action: Action) -> None:
        """Say in a note on ``error`` which cell it comes from."""
        cell = self._cells.get(action.microbatch)
        stage = self.stage
        add_note(
            error,
            f"in partition {stage.index} (layers {stage.layers}) on {stage.device}, micro-batch {action.microbatch} of "
            f"{self._microbatches}, {action.kind}; input: {shapes(cell and cell.inputs.value)}",
        )

    def _hold(self, i: int) -> None:
        """Before a backward: keep hooks, and gradients that have to be scaled, out of it."""
        every = self._end is not None and self._end.scales
        if not self._begun:
            self._begun = True
            self._held.hold(self.stage.module.parameters(), every=every)
        if every or self._grown is not None:  # layers may also use tensors that are no parameters of theirs
            graph = self._cells[i].below()
            self._held.hold(graph.leaves, every=every)
            self._expect_shown(graph)
        self.mixed += not every and self._grown is None

    def _expect_shown(self, graph: Below) -> None:
        if self._grown is not None and graph.hides:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise RuntimeError(_HIDES)
            self._grown = None  # it is a graph of an earlier run that keeps the nodes, and not somebody with hooks

    def _cell(self, i: int) -> Cell:
        stage = self.stage
        checkpointed = i < self._checkpoint_stop
        random: CellRandom | None = None
        if stage.may_draw or (checkpointed and stage.device.type == "cuda"):
            random = (CellRandom if stage.may_draw else Unwatched)(self._random, i << 12 | stage.index, stage.device)
        return CheckpointedCell(stage, random, self._circumstances) if checkpointed else Cell(stage, random)
