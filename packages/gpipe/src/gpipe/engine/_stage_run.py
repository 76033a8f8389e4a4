"""One stage in one run: it receives values, has cells compute them, and sends the results on.

Layers may change between runs. So each run observes in its first micro-batch whether they work in place, and whether
what they return is memory of their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import gt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from streams import add_note

from .._batchnorm import MiniBatchStatistics, commit
from .._current import current
from ..checkpoint._random import CellRNG
from ..schedule import Action, Kind
from ..transport._transport import AnyChannel
from ..values._constants import expect_plain
from ..values._describe import shapes
from ..values._leaves import Activation, as_nonleaf, versions
from ..values._sharing import given_state, owned, refuse_shared_changes, uncounted_of
from ._accumulate import GradientSums, counts_of_hooks
from ._block import Block
from ._cell import Cell, CheckpointedCell
from ._losses import Losses
from ._processes import may_be_data_parallel
from ._recomputation import Recomputation
from ._stage import Stage
from ._tensor_hooks import TensorHooks

if TYPE_CHECKING:
    from ._run import Run

_HIDES = (
    "someone (DistributedDataParallel?) has hooks where autograd accumulates the gradients of these parameters, "
    "which must be whole then; but the layers use torch.utils.checkpoint with use_reentrant=True, or contain a pipe, "
    "whose backward accumulates micro-batch by micro-batch; use use_reentrant=False"
)

_NEEDS_LESS = (
    "memory ran out: set more chunks (pipe.chunks), checkpoint this partition (pipe.checkpoint), or make the pipe from "
    "gpipe.plan(model, sample, devices, memory=...) with less than this device has"
)

_TOLD_LATE = (
    "a device reports an error of its kernels at a later call, so that an earlier micro-batch, or another partition on "
    "this device, may have caused it; CUDA_LAUNCH_BLOCKING=1 in the environment makes each call wait for its kernels"
)

_USED_UP = (
    "a layer uses a tensor that was computed with gradients outside of the pipeline, whose graph the first "
    "micro-batch has used up: compute it inside the layer, pass it to the pipe as an input, or detach it; or a layer "
    "has left a tensor with its graph in an attribute or a list, and the loss has used that graph up: return it from "
    "the layer, or leave its detach()"
)

_LATE_CHANGE = (
    "the layers of this partition changed their input in place on this micro-batch but not on the first, by which a "
    "run decides whether they need a copy; let them work on a clone"
)

_ADDS_HOOKS = (
    "the forward of a layer registered a hook on a parameter, which would be called once for each micro-batch that "
    "adds one; register it before the run"
)


class StageRun:
    """The cells of a stage in one run, and the channels to its neighbours.

    Args:
        departure: the channel to the stage after, or the loss.
        parameters: those of the stage when the run begins, if a backward follows.
        tied: leaves that other stages use too; their gradients are accumulated apart.

    Attributes:
        may_change_input: whether the layers change their input in place; True until the first forward has shown it.
        given: parameters and buffers whose memory the outputs of the first forward share, with their mark.
        forward_settings: a recomputation applies them. A step takes all its actions under the same; a backward of the
            caller's has others.
        adds: whether backwards may have added to gradients that were in ``.grad`` before the run.
    """

    def __init__(
        self,
        run: Run,
        stage: Stage,
        arrival: AnyChannel,
        departure: AnyChannel | Losses,
        parameters: Sequence[nn.Parameter],
        tied: Sequence[Tensor],
    ) -> None:
        self.stage = stage
        self.may_change_input = True
        self.given: list[tuple[Tensor, int]] = []
        self.adds = False
        self.forward_settings: Callable[[], AbstractContextManager[None]] = nullcontext
        # Not the run itself: it refers to its stages, and is to be freed without the garbage collector.
        self._size, self._left, self._keeps = run.size, run.size.microbatches, run.keeps
        self._loss, self._deferred = run.loss, run.deferred
        self._arrival, self._departure = arrival, departure
        self._parameters, self._tied = parameters, tied
        self._checkpoint_stop = stop = run.size.checkpoint_stops[stage.index]
        # A loss would hold its gradient until the backward. So it is computed from the output of the recomputation.
        self._late_losses = stop if isinstance(departure, Losses) and not departure.is_whole else 0
        self._recomputation = Recomputation(stage.module, stage.recomputation) if stop else None
        self._random = CellRNG(run.rng, 0, stage.numbers.start, module=stage.module)
        # Nothing is checkpointed in evaluation.
        has_blocks = stage.blocks and run.keeps and stage.module.training
        self._blocks = [Block(stage, numbers, run.context) for numbers in stage.blocks] if has_blocks else []
        self.recomputes = bool(stop or has_blocks)
        self._sums: GradientSums | None = None
        if run.kept_nodes and not {*map(id, run.kept_nodes)}.isdisjoint(map(id, parameters)):
            self._sums = GradientSums()
            run.sums.append(self._sums)
        self._observed = self._looks_for_hooks = self._has_begun = False
        self._cells: dict[int, Cell] = {}
        # A run inside a recomputed layer repeats a run whose statistics have been counted.
        repeats = current.microbatch is not None and current.statistics is None
        self._statistics: MiniBatchStatistics | None = None if repeats else {}

    def do(self, action: Action) -> None:
        getattr(self, action.kind)(action.microbatch)

    def forward(self, i: int) -> None:
        inputs = self._arrival.get_values(i)
        if inputs.marks and self.may_change_input:
            inputs = owned(inputs)  # the caller's tensors must not change, nor those that a recomputation needs
        stage = self.stage
        random, recomputation = self._random, self._recomputation if i < self._checkpoint_stop else None
        random.microbatch = i
        if recomputation is None:
            cell = Cell()
        else:
            random = random.again(stage.device)  # draws the same numbers later, when that of the stage has gone on
            cell = CheckpointedCell(random, recomputation)
        self._cells[i] = cell
        current.statistics, current.rng, current.blocks = self._statistics, random, self._blocks
        current.checkpointing, current.recomputing = recomputation is not None, False
        outputs = cell.forward(self, inputs)
        current.microbatch = current.statistics = current.rng = None  # the loss is outside of all stages
        current.checkpointing, current.blocks = False, ()
        self._left -= 1
        if not self._left and self._statistics:
            commit(self._statistics)
        if not self._keeps:
            del self._cells[i]
        if i >= self._late_losses:
            self._departure.put_values(i, outputs)

    def recompute(self, i: int) -> None:
        cell = self._cells[i]
        with self.forward_settings():
            cell.recompute(self)
        if i < self._late_losses:
            assert isinstance(cell, CheckpointedCell)
            current.microbatch = None
            self._departure.put_values(i, cell.recomputed(self))

    def backward(self, i: int) -> None:
        seeds = self._departure.get_gradients(i)
        if not self.adds:
            self._defer(i)
        gradients = self._cells[i].backward(seeds, self._sums)
        del self._cells[i]
        self._arrival.put_gradients(i, gradients)

    def backward_input(self, i: int) -> None:
        seeds = self._departure.get_gradients(i)
        self._defer(i)
        gradients = self._cells[i].backward_input(self.stage, seeds, self._sums)
        self._arrival.put_gradients(i, gradients)

    def backward_weight(self, i: int) -> None:
        self._cells[i].backward_weight(self._sums)
        del self._cells[i]

    def loss(self, i: int) -> None:
        """Compute the loss of the whole mini-batch."""
        assert isinstance(self._departure, Losses)
        current.microbatch = None  # it is outside of all stages
        self._departure.compute_whole()

    def compute(self, inputs: Activation) -> Activation:
        """The output of the layers for ``inputs``, which are leaves that the layers may still change in place."""
        if self._looks_for_hooks:
            return self._compute_watched(inputs)
        if self.may_change_input:
            return self._compute_first(inputs)
        stage, value = self.stage, inputs.value
        before = versions(inputs) if inputs.marks else []  # tensors without marks are used by this stage alone
        try:
            if stage.is_direct and isinstance(value, Tensor):  # most stages; saves three calls
                output = stage.module(value)
                if not isinstance(output, Tensor):
                    expect_plain(output, stage.index)
            else:
                output = stage.call(value)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise RuntimeError(_LATE_CHANGE) from error
            raise
        # Other stages or the caller use tensors with a mark too.
        if before and versions(inputs) != before:
            raise RuntimeError(_LATE_CHANGE)
        return Activation(output)

    def _compute_watched(self, inputs: Activation) -> Activation:
        self._looks_for_hooks = False
        with TensorHooks() as hooks:
            outputs = self.compute(inputs)
        self.stage.hooked = hooks.seen
        self._looks_for_hooks = not hooks.seen
        return outputs

    def _compute_first(self, inputs: Activation) -> Activation:
        """Like :meth:`compute`, for the first micro-batch of a run, or if the layers change their input in place."""
        stage, before = self.stage, versions(inputs)
        uncounted = uncounted_of(inputs) if inputs.marks else []
        hooked = counts_of_hooks(self._parameters)
        outputs = Activation(stage.call(as_nonleaf(inputs).value))
        if any(map(gt, counts_of_hooks(self._parameters), hooked)):
            raise RuntimeError(_ADDS_HOOKS)
        changed = versions(inputs) != before
        if changed or uncounted:
            refuse_shared_changes("the layers of this partition", inputs, before, uncounted)
        if not self._observed:
            self._observed = True
            self.given = given_state(stage.module, outputs.tensors)
            # The version counter of an inference tensor does not count.
            self.may_change_input = changed or any(map(Tensor.is_inference, inputs.tensors))
        return outputs

    def look_for_hooks(self) -> None:
        """Look for hooks in all forwards of this run, until some are seen: a split backward would call some twice."""
        self._looks_for_hooks = not self.stage.hooked

    def explained(self, error: BaseException, action: Action) -> BaseException:
        # Each cell has one backward. So if torch complains about a second one, a graph around the cells was used twice.
        is_second = type(error) is RuntimeError and "backward through the graph a second time" in str(error)
        in_loss = current.microbatch is None
        if is_second and (action.kind != Kind.FORWARD or in_loss):
            error, error.__cause__ = RuntimeError(_USED_UP), error
        stage = self.stage
        # A cell may be interrupted before it has any inputs.
        inputs = getattr(self._cells.get(action.microbatch), "inputs", None)
        place = f"micro-batch {action.microbatch} of {self._size.microbatches}, {action.kind}"
        if action.kind == Kind.LOSS:
            inputs, place = None, f"the loss of all {self._size.microbatches} micro-batches"
        # An error of a pipe inside a layer has this note already.
        is_first = _NEEDS_LESS not in getattr(error, "__notes__", ())
        add_note(
            error,
            f"in partition {stage.index} (layers {stage.layers}) on {stage.device}, {place}"
            + ("" if action.kind == Kind.LOSS else f"; input: {shapes(inputs and inputs.value)}"),
        )
        if is_first and is_out_of_memory(error):
            add_note(error, _NEEDS_LESS)
        elif isinstance(error, torch.AcceleratorError):
            add_note(error, _TOLD_LATE)
        if "device" in str(error) and (found := stage.elsewhere()):
            add_note(
                error,
                f"{found}: the model was moved after its pipe was made; a new pipe, GPipe(pipe[:], pipe.balance, "
                "devices=pipe.devices), moves all layers back; to have the model elsewhere too, move a copy of it",
            )
        return error

    def _defer(self, i: int) -> None:
        """Before a backward: remove hooks from its leaves, and ``.grad`` where gradients have to be scaled."""
        deferred = self._deferred
        every = self._loss is not None and self._loss.scales
        if not self._has_begun:
            self._has_begun = True
            if self._tied:
                deferred.hold(self._tied, tied=True)
            deferred.hold(self._parameters, every=every)
        if every or self._sums is not None:  # layers may also use leaves that are not their parameters
            graph = self._cells[i].below()
            deferred.hold(graph.leaves, every=every)
            if self._sums is not None and graph.hides:
                if may_be_data_parallel():
                    raise RuntimeError(_HIDES)
                self._sums = None  # what refers to the nodes is a graph of an earlier run, and not a hook
        self.adds = not every and self._sums is None


# Errors that torch raises as a plain RuntimeError: those of the CPU's allocator, of drivers, and of libraries that
# allocate without torch's allocator.
_TEXTS = re.compile(r"(?i)out of memory|can't allocate memory|not enough memory|ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or its cause, says that a device or the host has no memory left."""
    return any(
        isinstance(each, torch.OutOfMemoryError | MemoryError)
        or (isinstance(each, RuntimeError) and _TEXTS.search(str(each)) is not None)
        for each in (error, error.__cause__)
    )
