"""A cell: the forward, the recomputation if there is one, and the backward of one micro-batch on one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor

from .._current import setting
from ..checkpoint._random import CellRNG
from ..checkpoint._state import Snapshot
from ..values._leaves import Activation, clone_leaves, detach_leaves, like_accumulated, versions
from ..values._nested import laid_out_like
from ..values._sharing import KEPT, flag_aliases
from . import _autograd_calls as _engine
from ._accumulate import AccumulatedGradients
from ._graph_leaves import Below, below
from ._layers import Layers
from ._recomputation import Recomputation
from ._split_backward import backward_inputs

Result = TypeVar("Result")


class Cell:
    """One micro-batch on one stage, which keeps its graph from the forward to the backward.

    The graph begins at **leaves**, the detached inputs, and ends at the outputs. So every cell has a small backward of
    its own, and the gradients of the leaves are what the stage before waits for.
    """

    __slots__ = ("_layers", "_left", "_outputs", "inputs")
    _left: list[Callable[[AccumulatedGradients | None], object]]

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def forward(self, inputs: Activation) -> Activation:
        """Run the layers, and return the detached outputs."""
        self.inputs = inputs
        layers = self._layers
        outputs = layers.compute(inputs)
        self._outputs = outputs.tensors
        sent = detach_leaves(outputs)
        # No other value uses the memory of a single tensor, if none of the inputs and of the layers' tensors shares it.
        apart = not inputs.ties and not layers.given and len(sent.tensors) == 1
        return sent if apart else flag_aliases(sent, inputs, layers.given)

    def recompute(self) -> None:
        """Make :meth:`backward` possible. Nothing to do for a cell that keeps its graph."""

    def below(self) -> Below:
        """The leaves below the outputs, to which :meth:`backward` adds gradients."""
        return below(self._outputs, self.inputs.tensors)

    def backward(
        self, gradients: Sequence[Tensor | None], grown: AccumulatedGradients | None = None
    ) -> list[Tensor | None]:
        """Accumulate the gradients of the parameters, given those of the outputs.

        Args:
            gradients: those of the outputs; None where there is none.
            grown: collects the gradients of the parameters; without it they are added to ``.grad``.

        Returns:
            The gradients of the inputs, one for each tensor, in order; None where there is none.
        """
        outputs, seeds = self._flowing(gradients)
        inputs = self.inputs.tensors
        if outputs and grown is not None:
            return self._backwards(grown.backward, outputs, seeds, below(outputs, inputs), inputs)
        if outputs:
            self._backwards(_engine.accumulate, outputs, seeds)
        return list(map(_gradient, inputs))

    def backward_input(
        self, gradients: Sequence[Tensor | None], grown: AccumulatedGradients | None = None
    ) -> list[Tensor | None]:
        """The first part of a split backward: the gradients of the inputs. :meth:`backward_weight` does the rest.

        Where the graph cannot be split this is the whole backward.
        """
        inputs = self.inputs.tensors
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        outputs, seeds = self._flowing(gradients)
        if not leaves or not outputs:
            self._left = [partial(self.backward, gradients)]
            return [None] * len(inputs)
        parts = self._backwards(backward_inputs, outputs, seeds, leaves) if self._layers.may_split else None
        if parts is None:
            self._layers.runs_whole()
            self._left = []
            return self.backward(gradients, grown)
        found, weights = map(like_accumulated, parts[0], leaves), parts[1]
        self._left = [each.backward for each in weights]
        return [next(found) if leaf.requires_grad else None for leaf in inputs]

    def backward_weight(self, grown: AccumulatedGradients | None = None) -> None:
        """The second part of a split backward: accumulate the gradients of the parameters."""
        left, self._left = self._left[::-1], []  # may hold methods of this cell: a reference cycle
        while left:  # frees each, with its gradients, when it is done
            self._backwards(left.pop(), grown)

    def _flowing(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The outputs that have a gradient, and these gradients."""
        outputs, seeds = [], []
        for output, gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                outputs.append(output)
                seeds.append(gradient)
        return tuple(outputs), tuple(seeds)

    def _backwards(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run a part of the backward."""
        try:
            return work(*arguments)
        except RuntimeError as error:
            _explain(error)
            raise


_gradient = attrgetter("grad")


def _explain(error: RuntimeError) -> None:
    """Each cell has one backward. So if torch complains about a second one, a graph around the cells was used twice."""
    if "backward through the graph a second time" in str(error):
        raise RuntimeError(
            "a layer uses a tensor that was computed with gradients outside of the pipeline, whose graph the first "
            "micro-batch has used up; compute it inside the layer, pass it to the pipe as an input, or detach it"
        ) from error


class CheckpointedCell(Cell):
    """A cell that frees its graph after the forward, and computes the forward again just before the backward.

    If it turns out that the forward cannot be repeated, the cell keeps its graph, as any other does.
    """

    __slots__ = ("_computed", "_random", "_recomputation", "_remembered", "_sample", "_versions")
    _computed: Activation
    _remembered: Snapshot | None

    def __init__(self, layers: Layers, random: CellRNG, recomputation: Recomputation) -> None:
        super().__init__(layers)
        self._random = random
        self._recomputation = recomputation
        self._remembered = None

    def forward(self, inputs: Activation) -> Activation:
        self.inputs = inputs
        layers = self._layers
        spare = clone_leaves(inputs) if layers.may_change_input else None
        before = versions(inputs)
        remembered = self._recomputation.remember()
        # New leaves, because layers may put hooks and flags on their inputs, and will do so again.
        own = detach_leaves(inputs)
        with setting(checkpointing=True):
            outputs = layers.compute(own)
        self._random.forget()
        gone = spare is None and versions(inputs) != before
        if not self._recomputation.settle(remembered) or gone:
            self.inputs, self._computed, self._outputs = own, outputs, outputs.tensors
            return flag_aliases(detach_leaves(outputs), inputs, layers.given)
        if versions(inputs) != before:
            assert spare is not None
            self.inputs = spare
        self._remembered = remembered
        self._versions = versions(self.inputs)
        self._sample = self._recomputation.sample(outputs.tensors)
        kept = [(tensor, KEPT) for tensor in self.inputs.tensors]
        return flag_aliases(detach_leaves(outputs), inputs, [*kept, *layers.given])

    def recompute(self) -> None:
        """Run the layers again as in the forward, to build their graph."""
        if self._remembered is None:
            return
        self._expect_inputs()
        with self._recomputation.repeated(self._remembered, self._random, self._sample):
            self._computed = self._layers.compute(self.inputs)
        self._outputs = self._computed.tensors
        self._recomputation.expect_same(self._sample, self._outputs)

    def _flowing(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs, seeds = super()._flowing(gradients)
        if self._remembered is not None and self._sample.nested:
            seeds = tuple(map(laid_out_like, seeds, outputs))
        return outputs, seeds

    def recomputed(self) -> Activation:
        """The detached outputs, after the recomputation."""
        return flag_aliases(detach_leaves(self._computed), self.inputs, self._layers.given)

    def _expect_inputs(self) -> None:
        if versions(self.inputs) != self._versions:
            raise RuntimeError(
                "the input of this partition was changed in place after its forward, and its recomputation needs it as "
                "it was; change a clone instead, or use checkpoint='never'"
            )
