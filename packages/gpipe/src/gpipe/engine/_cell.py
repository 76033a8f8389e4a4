"""A cell: the forward, optional recomputation, and backward of one micro-batch on one stage."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from ..values._leaves import Activation, accumulate_gradient
from . import _autograd_calls as _engine
from ._accumulate import GradientSums, find_leaves
from ._recomputation import Repeat
from ._split_backward import Weights, backward_inputs
from ._stage import Stage

Gradients = Sequence[Tensor | None]
"""One gradient per tensor; None for a tensor without a gradient."""


class Cell:
    """The data that a stage keeps for a micro-batch.

    Its graph begins at **leaves**, the detached inputs, and ends at the outputs. The previous stage waits for the
    gradients of the leaves. A cell does not refer to its stage, so that a run is freed without the garbage collector.

    Attributes:
        inputs: the leaves.
        outputs: the outputs of the layers; None before the forward, and until a freed graph is rebuilt.
        repeat: the record for its recomputation; None if the graph is kept.
        seeds: the gradients of the outputs, if a split backward does everything in its second half.
        weights: the remaining parts for the second half, in reverse order.
    """

    __slots__ = ("inputs", "outputs", "repeat", "seeds", "weights")

    def __init__(self, inputs: Activation) -> None:
        self.inputs = inputs
        self.outputs: Activation | None = None
        self.repeat: Repeat | None = None
        self.seeds: Gradients | None = None
        self.weights: list[Weights] = []


def backward(cell: Cell, seeds: Gradients, sums: GradientSums | None) -> list[Tensor | None]:
    """Accumulate the gradients of parameters in ``sums``, or in ``.grad``; return the gradients of the inputs.

    Args:
        cell: its graph is freed.
        seeds: the gradients of its outputs.
        sums: holds gradients outside ``.grad``.
    """
    outputs, flowing = _flowing(cell, seeds)
    inputs = cell.inputs.tensors
    if outputs and sums is not None:
        # Autograd returns the gradients of all leaves, because adding them to .grad would call hooks.
        return sums.backward(outputs, flowing, find_leaves(outputs, inputs), inputs)
    if outputs:
        _engine.accumulate(outputs, flowing)
    return list(map(_gradient, inputs))


def backward_input(cell: Cell, seeds: Gradients, sums: GradientSums | None, stage: Stage) -> list[Tensor | None]:
    """Compute the gradients of the inputs, the first half of a split backward; all gradients if it cannot be split."""
    inputs = cell.inputs.tensors
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    outputs, flowing = _flowing(cell, seeds)
    if not leaves or not outputs:
        cell.seeds = seeds  # no stage waits for a gradient
        return [None] * len(inputs)
    halves = None if stage.hooked else backward_inputs(outputs, flowing, leaves)
    if halves is None:
        stage.run_whole()
        return backward(cell, seeds, sums)
    gradients, weights = halves
    cell.weights = weights[::-1]
    # Use the strides that they would have in .grad, because kernels of the previous stage may round depending on them.
    flowing_back = map(accumulate_gradient, gradients, leaves)
    return [next(flowing_back) if leaf.requires_grad else None for leaf in inputs]


def backward_weight(cell: Cell, sums: GradientSums | None) -> None:
    """Compute the gradients of parameters, the second half of a split backward."""
    if cell.seeds is not None:
        backward(cell, cell.seeds, sums)
    while cell.weights:  # frees each part, with its gradients, once it is finished
        cell.weights.pop().backward(sums)


def _flowing(cell: Cell, seeds: Gradients) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the outputs that receive gradients, and these gradients."""
    assert cell.outputs is not None
    outputs = cell.outputs.tensors
    if len(seeds) == 1 and (seed := seeds[0]) is not None and outputs[0].requires_grad:
        return outputs, (seed,)  # the common case
    pairs = [
        (output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None and output.requires_grad
    ]
    return tuple(output for output, _ in pairs), tuple(seed for _, seed in pairs)


_gradient = attrgetter("grad")
