"""One stage in one run: receive values, compute the layers, and send the results.

Layers may change between runs. So each run checks in its first micro-batch whether they modify their input in place,
and whether they return memory of their parameters or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import gt
from typing import NamedTuple

from torch import Tensor, nn

from .._batchnorm import MiniBatchStatistics, commit
from .._current import Work, current, doing
from .._torch import saved_tensors_hooks
from ..checkpoint._parametrized import is_caching, own_cache
from ..checkpoint._random import CellRNG
from ..schedule import Kind, Step
from ..schedule._actions import TRANSFERS
from ..transport._transport import AnyChannel
from ..values._leaves import Activation, as_nonleaf, detach_leaves, versions
from ..values._sharing import (
    PRESERVED,
    clone_preserved,
    copy_uncounted,
    find_shared_state,
    flag_aliases,
    refuse_shared_changes,
)
from ._accumulate import DeferredGradients, GradientSums, GraphLeaves, counts_of_hooks, find_leaves
from ._cell import Cell, backward, backward_input, backward_weight
from ._leaked_graphs import guard
from ._losses import Losses
from ._offloaded import Offloaded
from ._processes import may_be_data_parallel
from ._saved import SavedTensors
from ._spec import RunSpec
from ._stage import Stage
from ._tensor_hooks import TensorHooks


class Trained(NamedTuple):
    """The leaves of a stage, and the places where their gradients accumulate.

    Attributes:
        parameters: the parameters of the stage, if the run has backwards.
        tied: leaves that other stages also use.
        deferred: holds ``.grad`` and hooks of the leaves of all stages.
        sums: holds gradients outside ``.grad`` if a parameter's ``AccumulateGrad`` node has hooks, or may have; else
            None.
        offloaded: the copies of the parameters, if these are on the host.
        saving: returns the object that collects a cell's saved tensors, if they are offloaded.
    """

    parameters: Sequence[nn.Parameter]
    tied: Sequence[Tensor]
    deferred: DeferredGradients
    sums: GradientSums | None
    offloaded: Offloaded | None = None
    saving: Callable[[], SavedTensors] | None = None


class StageRuns:
    """Makes the :class:`StageRun` of each stage, for one run."""

    @property
    def of(self) -> Callable[..., StageRun]:
        """The class of the stage runs, or a function with the same arguments."""
        return StageRun

    def walking(self) -> AbstractContextManager[None]:
        """Return the context of the caller while workers take steps."""
        return nullcontext()


class StageRun:
    """The cells of a stage in one run, and the channels to its neighbors.

    Args:
        random: the random numbers of its layers.
        arrival: the channel from the previous stage, or from the caller.
        departure: the channel to the next stage or to the caller, or the losses.

    Attributes:
        may_change_input: whether the layers modify their input in place; True until the first forward.
        given: parameters and buffers that share memory with the outputs of the first forward, with their mark.
        adds: whether a backward may have accumulated into an existing ``.grad``.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: Stage,
        random: CellRNG,
        arrival: AnyChannel,
        departure: AnyChannel | Losses,
        trained: Trained,
    ) -> None:
        self.stage = stage
        self.may_change_input = True
        self.given: list[tuple[Tensor, int]] = []
        self.adds = False
        self._spec, self._random, self._arrival = spec, random, arrival
        self._departure = None if isinstance(departure, Losses) else departure
        self._loss = departure if isinstance(departure, Losses) else None
        self._left = spec.size.microbatches
        self._left_backwards = self._left if spec.trains else 0
        self._offloaded = trained.offloaded
        self._checkpoint_stop = stop = spec.size.checkpoint_stops[stage.index]
        # A loss in the forward would hold its gradient until the backward. So it is computed after the recomputation.
        self._late_losses = stop if self._loss is not None and not self._loss.is_whole else 0
        if stop:
            stage.recomputation.begin()
        self.recomputes = bool(stop)
        self._trained = trained
        self._sums = trained.sums
        self._has_observed = self._has_held = False
        # A split backward would call some hooks twice.
        self._looks_for_hooks = stage.index in spec.splits and not stage.hooked
        self._cells: dict[int, Cell] = {}
        self._saving = trained.saving
        self._saved: dict[int, SavedTensors] = {}
        # A run inside a recomputed layer repeats a run whose statistics were counted already.
        repeats = current.work.microbatch is not None and current.work.statistics is None
        self._statistics: MiniBatchStatistics | None = None if repeats else {}

    def work(self, base: Work, step: Step) -> Work:
        """Return the record for ``step``: ``base`` with the random numbers and statistics of the cell."""
        skips, _, graph_task, *_ = base
        kind, i = step.action
        if self._offloaded is not None and kind not in TRANSFERS:
            self._offloaded.arrive()
        if kind == Kind.FORWARD:
            self._random.microbatch = i
            random, statistics = self._random, self._statistics
            if i >= self._checkpoint_stop:
                return Work(skips, step, graph_task, i, "", random, statistics)
            # The recomputation repeats these random numbers, although the stage draws more before it.
            random = random.fork(self.stage.device)
            return Work(skips, step, graph_task, i, "checkpointing", random, statistics)
        if kind == Kind.RECOMPUTE and (repeat := self._cells[i].repeat) is not None:
            return Work(skips, step, graph_task, i, "recomputing", repeat.random, None, base.recompute_under)
        return Work(skips, step, graph_task, None if kind == Kind.LOSS else i)

    def forward(self, i: int) -> None:
        inputs = self._arrival.get_values(i)
        if inputs.marks and self.may_change_input:
            inputs = clone_preserved(inputs)  # the caller and recomputations need the original tensors
        self._cells[i] = cell = Cell(inputs)
        leaves, before = inputs, None
        if i < self._checkpoint_stop:
            # Separate leaves, because layers may put hooks and flags on their inputs, and will do so again.
            leaves = detach_leaves(inputs)
            before = self.stage.recomputation.before(inputs, may_change=self.may_change_input)
        with self._collecting(i):
            outputs = self.compute(leaves)
        guard(self.stage, leaves.tensors, i)  # after the layers, which may read the hooks of their input
        if before is not None:
            cell.repeat = self.stage.recomputation.repeat(before, outputs.tensors, current.work.rng)
        # A later stage must not modify the inputs of the recomputation in place.
        kept = [] if cell.repeat is None else [(tensor, PRESERVED) for tensor in cell.repeat.inputs.tensors]
        sent = self._detach_outputs(inputs, outputs, kept)
        if cell.repeat is None:
            cell.inputs, cell.outputs = leaves, outputs
        else:
            cell.inputs = cell.repeat.inputs
        del outputs, leaves  # a graph that is not kept is freed before its outputs are copied
        self._end_forward(i)
        if i >= self._late_losses:
            self._send(i, sent)

    def _collecting(self, i: int) -> AbstractContextManager[None]:
        """Return the context of a forward, which collects its saved tensors if they are offloaded."""
        if self._saving is None or (self.stage.index, i) not in self._spec.cells_offloaded:
            return nullcontext()
        self._saved[i] = self._saving()
        return self._saved[i].saving()

    def recompute(self, i: int) -> None:
        """Rebuild the graph of a checkpointed cell, and compute a loss that was deferred to here."""
        cell, repeat = self._cells[i], self._cells[i].repeat
        if repeat is not None:
            with current.work.recompute_under(), own_cache(is_caching()), repeat.restored():
                outputs = self.compute(repeat.inputs)
                self.stage.recomputation.expect_same(repeat, outputs.tensors)
            guard(self.stage, repeat.inputs.tensors, i)
            cell.outputs = outputs
        if i < self._late_losses:
            assert cell.outputs is not None
            self._send(i, self._detach_outputs(cell.inputs, cell.outputs, []))

    def backward(self, i: int) -> None:
        seeds = self._seeds(i)
        self._arrive(i)
        if not self.adds:
            self._hold(i)
        gradients = backward(self._cells[i], seeds, self._sums)
        self._forget(i)
        self._left_backwards -= 1
        self._arrival.put_gradients(i, gradients)

    def backward_input(self, i: int) -> None:
        seeds = self._seeds(i)
        self._arrive(i)
        self._hold(i)
        self._arrival.put_gradients(i, backward_input(self._cells[i], seeds, self._sums, self.stage))

    def backward_weight(self, i: int) -> None:
        backward_weight(self._cells[i], self._sums)
        self._forget(i)
        self._left_backwards -= 1

    def loss(self, i: int) -> None:
        """Compute the loss of the full mini-batch."""
        assert self._loss is not None
        self._loss.compute_whole()

    def load(self, number: int) -> None:
        """Begin to copy the parameters from the host."""
        assert self._offloaded is not None
        self._offloaded.load()

    def unload(self, number: int) -> None:
        """Free the copies of the parameters; after the last backward, send their gradients to the host."""
        assert self._offloaded is not None
        ends = not self._left and not self._left_backwards
        self._offloaded.unload(ends=ends)
        if ends and self._spec.updates is not None:
            self._spec.updates.update_stage(self.stage.index)

    def offload(self, i: int) -> None:
        """Begin to copy what a cell has saved to the host."""
        self._saved[i].offload()

    def prefetch(self, i: int) -> None:
        """Begin to copy it back."""
        self._saved[i].prefetch()

    def _arrive(self, i: int) -> None:
        if i in self._saved:
            self._saved[i].arrive()

    def _forget(self, i: int) -> None:
        del self._cells[i]
        self._saved.pop(i, None)

    def leave(self) -> None:
        """Make later computations wait for copies to the device, which no backward has waited for after a failure."""
        for saved in self._saved.values():
            saved.arrive()

    def get_inputs(self, microbatch: int) -> Activation | None:
        """Return the inputs of a cell for messages; None before its forward and after its backward."""
        cell = self._cells.get(microbatch)
        return None if cell is None else cell.inputs

    def compute(self, inputs: Activation) -> Activation:
        """Return the output of the layers for ``inputs``, which are leaves that the layers may modify in place."""
        if self._looks_for_hooks:
            return self._compute_watched(inputs)
        if self.may_change_input:
            return self._compute_first(inputs)
        before = versions(inputs) if inputs.marks else []  # only this stage uses tensors without marks
        try:
            output = self.stage.call(inputs.value)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise RuntimeError(_LATE_CHANGE) from error
            raise
        # Tensors with a mark are also used by other stages or by the caller.
        if before and versions(inputs) != before:
            raise RuntimeError(_LATE_CHANGE)
        return Activation(output)

    def _compute_watched(self, inputs: Activation) -> Activation:
        self._looks_for_hooks = False
        own = saved_tensors_hooks() if self._saved else None
        with TensorHooks(own) as hooks:
            outputs = self.compute(inputs)
        self.stage.hooked = hooks.seen
        self._looks_for_hooks = not hooks.seen
        return outputs

    def _compute_first(self, inputs: Activation) -> Activation:
        """Do the same as :meth:`compute` in the first micro-batch, or if the layers modify their input in place."""
        stage, before = self.stage, versions(inputs)
        uncounted = copy_uncounted(inputs) if inputs.marks else []
        hooked = counts_of_hooks(self._trained.parameters)
        outputs = Activation(stage.call(as_nonleaf(inputs).value))
        if any(map(gt, counts_of_hooks(self._trained.parameters), hooked)):
            raise RuntimeError(_ADDS_HOOKS)
        changed = versions(inputs) != before
        if changed or uncounted:
            refuse_shared_changes("the layers of this partition", inputs, before, uncounted)
        if not self._has_observed:
            self._has_observed = True
            self.given = find_shared_state(stage.module, outputs.tensors)
            # Inference tensors have no version counter.
            self.may_change_input = changed or any(map(Tensor.is_inference, inputs.tensors))
        return outputs

    def _detach_outputs(self, inputs: Activation, outputs: Activation, kept: list[tuple[Tensor, int]]) -> Activation:
        """Return the outputs for the next stage, as leaves of a new graph."""
        sent = detach_leaves(outputs)
        if self._offloaded is not None:
            sent = sent.with_tensors(map(self._offloaded.own, sent.tensors))
        # A single tensor needs no mark if it shares no memory with the inputs or with tensors of the layers.
        is_apart = not kept and not inputs.marks and not self.given and len(sent.tensors) == 1
        return sent if is_apart else flag_aliases(sent, inputs, [*kept, *self.given])

    def _end_forward(self, i: int) -> None:
        self._left -= 1
        if not self._left and self._statistics:
            commit(self._statistics)
        if not self._spec.trains:
            del self._cells[i]

    def _send(self, i: int, outputs: Activation) -> None:
        if self._loss is None:
            assert self._departure is not None
            self._departure.put_values(i, outputs)
        else:
            # The loss is computed outside all layers.
            with doing(microbatch=None, phase="", rng=None, statistics=None):
                self._loss.take(i, outputs)

    def _seeds(self, i: int) -> list[Tensor | None]:
        """Return the gradients of the outputs."""
        if self._loss is not None:
            return self._loss.pop_gradients(i)
        assert self._departure is not None
        return self._departure.get_gradients(i)

    def _hold(self, i: int) -> None:
        """Remove the hooks of the cell's leaves before its backward, and ``.grad`` if gradients have to be scaled."""
        parameters, tied, deferred, *_ = self._trained
        every = self._spec.loss is not None and self._spec.loss.scales
        if not self._has_held:
            self._has_held = True
            if self._offloaded is not None:
                self._offloaded.expect_own(self._below(i).leaves)
            if tied:
                deferred.hold(tied, tied=True)
            deferred.hold(parameters, every=every)
        if every or self._sums is not None:  # layers may also use leaves that are not their parameters
            graph = self._below(i)
            deferred.hold(graph.leaves, every=every)
            if self._sums is not None and graph.hides:
                if may_be_data_parallel():
                    raise RuntimeError(_HIDES)
                self._sums = None  # the nodes are held by a graph of an earlier run, not by a hook
        self.adds = not every and self._sums is None

    def _below(self, i: int) -> GraphLeaves:
        """Return the graph of a cell."""
        cell = self._cells[i]
        assert cell.outputs is not None
        return find_leaves(cell.outputs.tensors, cell.inputs.tensors)


_HIDES = (
    "someone (DistributedDataParallel?) has hooks where autograd accumulates the gradients of these parameters, "
    "which must be whole then; but the layers use torch.utils.checkpoint with use_reentrant=True, or contain a pipe, "
    "whose backward accumulates micro-batch by micro-batch; use use_reentrant=False"
)

_LATE_CHANGE = (
    "the layers of this partition changed their input in place on this micro-batch but not on the first, by which a "
    "run decides whether they need a copy; let them work on a clone"
)

_ADDS_HOOKS = (
    "the forward of a layer registered a hook on a parameter, which would be called once for each micro-batch that "
    "adds one; register it before the run"
)
