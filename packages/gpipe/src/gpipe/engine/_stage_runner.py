"""One stage in one run: it receives values, has a cell compute, and sends the results on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streams import add_note

from .._current import current
from .._moments import MiniBatchStatistics, commit
from ..checkpoint._random import CellRNG
from ..schedule import Action, Kind
from ..transport._link import Channel
from ..transport._ports import Ports
from ..values._describe import shapes
from ..values._sharing import owned
from ._block import Block
from ._cell import Cell, CheckpointedCell
from ._failed_cell import FailedCell, failed_cell, is_out_of_memory, mark
from ._graph_leaves import Below
from ._layers import Layers
from ._losses import Losses
from ._mini_batch import MiniBatch
from ._parameters import parameters_of
from ._recomputation import Recomputation
from ._stage import Stage

_HIDES = (
    "someone (DistributedDataParallel?) has hooks where autograd accumulates the gradients of these parameters, "
    "which must be whole then; but the layers use torch.utils.checkpoint with use_reentrant=True, or contain a pipe, "
    "whose backward accumulates micro-batch by micro-batch; use use_reentrant=False"
)

_NEEDS_LESS = (
    "memory ran out: set more chunks (pipe.chunks), checkpoint this partition (pipe.checkpoint), or make the pipe from "
    "gpipe.plan(model, sample, devices, memory=...) with less than this device has"
)


class StageRunner:
    """The cells of one stage in one run, and the channels to its neighbours.

    Args:
        mini_batch: the mini-batch, which all stages share.
        stage: the stage.
        arrival: the channel from the stage before.
        departure: the channel to the stage after, or the loss.
        tied: leaves that other stages use too; their gradients are accumulated apart from those of other leaves.

    Attributes:
        layers: the layers of the stage, in this run.
        recomputations: what its checkpointed cells share, and those of each of its blocks.
        mixed: the number of micro-batches that may have added to gradients that were in ``.grad`` before the run.
    """

    def __init__(
        self,
        mini_batch: MiniBatch,
        stage: Stage,
        arrival: Channel | Ports,
        departure: Channel | Ports | Losses,
        tied: Sequence[Tensor] = (),
    ) -> None:
        self.stage = stage
        self.layers = Layers(stage)
        self.mixed = 0
        self._mini_batch = mini_batch
        self._arrival = arrival
        self._departure = departure
        self._tied = tied
        self._grown = mini_batch.accumulated_outside(stage) if mini_batch.kept_nodes else None
        self._checkpoint_stop = mini_batch.checkpoint_stops[stage.index]
        # A loss would hold its gradient until the backward. So it is computed from the output of the recomputation.
        self._late_losses = self._checkpoint_stop if isinstance(departure, Losses) else 0
        self._begun = False
        self._adds_directly = False
        self._recomputation: Recomputation | None = None
        self._blocks: list[Block] = []
        if self._checkpoint_stop:
            facts = stage.facts.recomputation
            self._recomputation = Recomputation(stage.module, stage.device, facts, mini_batch.context)
        if stage.blocks and mini_batch.keeps and stage.module.training:
            self._blocks = [Block(stage, numbers, mini_batch.context) for numbers in stage.blocks]
        whole = [] if self._recomputation is None else [self._recomputation]
        self.recomputations = [*whole, *(block.recomputation for block in self._blocks)]
        self._cells: dict[int, Cell] = {}
        self._forwards = 0
        # A run inside a recomputed layer repeats a run whose statistics have been counted.
        repeats = current.microbatch is not None and current.statistics is None
        self._statistics: MiniBatchStatistics | None = None if repeats else {}

    def do(self, action: Action) -> None:
        """Do one action of the stage."""
        ACTIONS[action.kind](self, action.microbatch)

    def forward(self, i: int) -> None:
        inputs = self._arrival.get_values(i)
        if inputs.ties and self.layers.may_change_input:
            inputs = owned(inputs)  # the caller's tensors must not change, nor those that a recomputation needs
        recomputed = self._recomputation if i < self._checkpoint_stop else None
        stage = self.stage
        device = None if recomputed is None else stage.device
        random = CellRNG(self._mini_batch.rng, i, stage.numbers.start, device, stage.module)
        cell = Cell(self.layers) if recomputed is None else CheckpointedCell(self.layers, random, recomputed)
        self._cells[i] = cell
        current.statistics, current.rng, current.blocks = self._statistics, random, self._blocks
        outputs = cell.forward(inputs)
        current.microbatch = current.statistics = current.rng = None  # the loss is outside of all stages
        current.blocks = ()
        self._forwards += 1
        if self._forwards == self._mini_batch.microbatches:
            self._finish_forwards()
        if not self._mini_batch.keeps:
            del self._cells[i]
        if i >= self._late_losses:
            self._departure.put_values(i, outputs)

    def _finish_forwards(self) -> None:
        if self._statistics:
            commit(self._statistics)

    def recompute(self, i: int) -> None:
        self.stage.expect_current()
        cell = self._cells[i]
        cell.recompute()
        if i < self._late_losses:
            assert isinstance(cell, CheckpointedCell)
            current.microbatch = None
            self._departure.put_values(i, cell.recomputed())

    def backward(self, i: int) -> None:
        seeds = self._departure.get_gradients(i)
        if self._adds_directly:
            self.mixed += 1
        else:
            self._hold(i)
        gradients = self._cells[i].backward(seeds, self._grown)
        del self._cells[i]
        self._arrival.put_gradients(i, gradients)

    def backward_input(self, i: int) -> None:
        seeds = self._departure.get_gradients(i)
        self._hold(i)
        gradients = self._cells[i].backward_input(seeds, self._grown)
        self._arrival.put_gradients(i, gradients)

    def backward_weight(self, i: int) -> None:
        self._cells[i].backward_weight(self._grown)
        del self._cells[i]

    def look_for_hooks(self) -> None:
        """In the next forward, check for hooks that layers put on tensors."""
        self.layers.look_for_hooks()

    def annotate(self, error: BaseException, action: Action) -> None:
        """Add a note to ``error`` that names the cell."""
        cell = self._cells.get(action.microbatch)
        stage, m = self.stage, self._mini_batch.microbatches
        first, end = stage.numbers.start, stage.numbers.stop
        stages, stop = len(self._mini_batch.checkpoint_stops), self._checkpoint_stop
        j = stage.index
        place = j, stages, first, end, str(stage.device)
        is_first = failed_cell(error) is None  # not so for an error of a pipe inside a layer
        mark(error, FailedCell(*place, action.microbatch, m, str(action.kind), stop))
        add_note(
            error,
            f"in partition {j} (layers {stage.layers}) on {stage.device}, micro-batch {action.microbatch} of "
            f"{m}, {action.kind}; input: {shapes(cell and cell.inputs.value)}",
        )
        if is_first and is_out_of_memory(error):
            add_note(error, _NEEDS_LESS)

    def _hold(self, i: int) -> None:
        """Before a backward: remove hooks, and ``.grad`` where gradients have to be scaled, from its leaves."""
        loss, deferred = self._mini_batch.loss, self._mini_batch.deferred
        every = loss is not None and loss.scales
        if not self._begun:
            self._begun = True
            if self._tied:
                deferred.hold(self._tied, every=True)
            deferred.hold(parameters_of(self.stage.module), every=every)
        if every or self._grown is not None:  # layers may also use leaves that are not their parameters
            graph = self._cells[i].below()
            deferred.hold(graph.leaves, every=every)
            self._expect_shown(graph)
        self._adds_directly = not every and self._grown is None
        self.mixed += self._adds_directly

    def _expect_shown(self, graph: Below) -> None:
        if self._grown is not None and graph.hides:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise RuntimeError(_HIDES)
            self._grown = None  # what refers to the nodes is a graph of an earlier run, and not a hook


ACTIONS: dict[Kind, Callable[[StageRunner, int], None]] = {
    Kind.FORWARD: StageRunner.forward,
    Kind.RECOMPUTE: StageRunner.recompute,
    Kind.BACKWARD: StageRunner.backward,
    Kind.BACKWARD_INPUT: StageRunner.backward_input,
    Kind.BACKWARD_WEIGHT: StageRunner.backward_weight,
}
"""For each kind of action, the method that does it for a micro-batch."""
