"""A cell: the forward, the recomputation if there is one, and the backward of one micro-batch on one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from .._current import current
from ..checkpoint._random import CellRNG
from ..values._leaves import Activation, accumulated, clone_leaves, detach_leaves
from ..values._sharing import PRESERVED, flag_aliases
from . import _autograd_calls as _engine
from ._accumulate import Below, GradientSums, below
from ._left_behind import guard
from ._recomputation import Recomputation, Repeatable
from ._split_backward import backward_inputs
from ._stage import Stage

if TYPE_CHECKING:
    from ._stage_run import StageRun


class Cell:
    """One micro-batch on one stage, which keeps its graph from the forward to the backward.

    The graph begins at **leaves**, the detached inputs, and ends at the outputs; the stage before waits for the
    gradients of the leaves. A cell does not refer to its stage, so that a run is freed without the garbage collector.
    """

    __slots__ = ("_left", "_outputs", "inputs")
    _left: list[Callable[[GradientSums | None], object]]

    def forward(self, stage: StageRun, inputs: Activation) -> Activation:
        self.inputs = inputs
        outputs = stage.compute(inputs)
        # After the layers, which may look at the hooks of their input.
        guard(stage.stage, inputs.tensors)
        self._outputs = outputs.tensors
        # The graph ends here. The next stage begins one of its own, whose backward gives the gradients of these leaves.
        sent = detach_leaves(outputs)
        # No other value uses the memory of a single tensor, if none of the inputs and of the layers' tensors shares it.
        apart = not inputs.marks and not stage.given and len(sent.tensors) == 1
        return sent if apart else flag_aliases(sent, inputs, stage.given)

    def recompute(self, stage: StageRun) -> None:
        """Make :meth:`backward` possible; a cell that keeps its graph has nothing to do."""

    def below(self) -> Below:
        return below(self._outputs, self.inputs.tensors)

    def backward(self, gradients: Sequence[Tensor | None], sums: GradientSums | None = None) -> list[Tensor | None]:
        """Accumulate the gradients of the parameters in ``sums``, or in ``.grad``; return those of the inputs.

        ``gradients`` are those of the outputs. None stands where there is no gradient.
        """
        outputs, seeds = self._outputs, tuple[Tensor, ...]()
        if len(gradients) == 1 and (seed := gradients[0]) is not None and outputs[0].requires_grad:
            seeds = (seed,)  # most cells have one output
        else:
            outputs, seeds = self._flowing(gradients)
        inputs = self.inputs.tensors
        if outputs and sums is not None:
            # Autograd returns the gradients of all leaves, instead of adding them to .grad, which would call hooks.
            return sums.backward(outputs, seeds, below(outputs, inputs), inputs)
        if outputs:
            _engine.accumulate(outputs, seeds)
        return list(map(_gradient, inputs))

    def backward_input(
        self, stage: Stage, gradients: Sequence[Tensor | None], sums: GradientSums | None = None
    ) -> list[Tensor | None]:
        """The first part of a split backward: the gradients of the inputs; the whole backward if it cannot be split."""
        inputs = self.inputs.tensors
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        outputs, seeds = self._flowing(gradients)
        if not leaves or not outputs:
            # No stage waits for a gradient, so that the whole backward may wait for the second part.
            self._left = [partial(self.backward, gradients)]
            return [None] * len(inputs)
        parts = None if stage.hooked else backward_inputs(outputs, seeds, leaves)
        if parts is None:
            stage.run_whole()
            self._left = []
            return self.backward(gradients, sums)
        # Also with the strides that they would have in .grad: kernels of the stage before may round by them.
        found, weights = map(accumulated, parts[0], leaves), parts[1]
        self._left = [each.backward for each in weights]
        return [next(found) if leaf.requires_grad else None for leaf in inputs]

    def backward_weight(self, sums: GradientSums | None = None) -> None:
        left, self._left = self._left[::-1], []  # may hold methods of this cell: a reference cycle
        while left:  # frees each, with its gradients, when it is done
            left.pop()(sums)

    def _flowing(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs, seeds = [], []
        for output, gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                outputs.append(output)
                seeds.append(gradient)
        return tuple(outputs), tuple(seeds)


_gradient = attrgetter("grad")


class CheckpointedCell(Cell):
    """A cell that frees its graph after the forward, and computes the forward again just before the backward.

    It keeps its graph if the forward cannot be repeated.
    """

    __slots__ = ("_computed", "_random", "_repeatable")
    _computed: Activation

    def __init__(self, random: CellRNG, recomputation: Recomputation) -> None:
        self._random = random
        self._repeatable = Repeatable(recomputation, random)

    def forward(self, stage: StageRun, inputs: Activation) -> Activation:
        self.inputs = inputs  # named in the note of an error
        spare = clone_leaves(inputs) if stage.may_change_input else None
        # New leaves, because layers may put hooks and flags on their inputs, and will do so again.
        own = detach_leaves(inputs)
        outputs = self._repeatable.first(partial(stage.compute, own), inputs, spare)
        guard(stage.stage, own.tensors)
        if self._repeatable.inputs is None:
            self.inputs, self._computed, self._outputs = own, outputs, outputs.tensors
            return flag_aliases(detach_leaves(outputs), inputs, stage.given)
        self.inputs = self._repeatable.inputs
        # A later stage that works in place must not change what the recomputation needs.
        kept = [(tensor, PRESERVED) for tensor in self.inputs.tensors]
        return flag_aliases(detach_leaves(outputs), inputs, [*kept, *stage.given])

    def recompute(self, stage: StageRun) -> None:
        if self._repeatable.inputs is not None:
            current.recomputing, current.rng = True, self._random
            self._computed = self._repeatable.again(partial(stage.compute, self.inputs))
            current.recomputing, current.rng = False, None
            guard(stage.stage, self.inputs.tensors)
            self._outputs = self._computed.tensors

    def recomputed(self, stage: StageRun) -> Activation:
        return flag_aliases(detach_leaves(self._computed), self.inputs, stage.given)
