"""A cell: one micro-batch on one stage, forwards, perhaps once more, and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from microbatch import Batch
from streams import Context

from ._checkpoint import Witness, checkpointing, recomputing, training_flags
from ._random import CellRandom, Refusal, RunRandom
from ._stage import Stage
from ._value import cloned, cut, versions

_NOTHING: AbstractContextManager[None] = nullcontext()

# What torch.autograd.backward calls after checks of its own, which take longer than the backward of a small cell. The
# gradients here come from other cells and have the right shapes.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


class Cell:
    """One micro-batch on one stage, which keeps its graph from the forward to the backward.

    The graph begins at **leaves**, the inputs cut off from the stage before, and ends at the outputs. So every backward
    is a small one of its own, and the gradients of the leaves are what the stage before waits for.
    """

    __slots__ = ("_outputs", "_random", "_stage", "inputs")

    def __init__(self, stage: Stage, random: CellRandom | None = None) -> None:
        self._stage = stage
        self._random = random

    def forward(self, inputs: Batch) -> Batch:
        """Run the layers; the outputs, cut off."""
        self.inputs = inputs
        self._outputs = self._compute(inputs)
        return cut(self._outputs)

    def recompute(self) -> None:
        """Make :meth:`backward` possible; here it is already."""

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Accumulate the gradients of the parameters, given those of the outputs; the gradients of the inputs.

        There is one for each tensor, in order; None where nothing flows.
        """
        flowing = [
            (output, gradient)
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if flowing:
            outputs, seeds = zip(*flowing, strict=True)
            with _NOTHING if self._random is None else self._random.backward():
                _run_backward(outputs, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return [leaf.grad for leaf in self.inputs]

    def _compute(self, inputs: Batch) -> Batch:
        if self._random is None:
            return self._stage.compute(inputs)
        with self._random.drawn_from():
            outputs = self._stage.compute(inputs)
        self._stage.saw_draw(self._random.drew)
        return outputs


class CheckpointedCell(Cell):
    """A cell that lets its graph go after the forward, and builds it again just before the backward."""

    __slots__ = ("_buffers", "_context", "_run", "_training", "_versions", "_witness")

    def __init__(self, stage: Stage, random: CellRandom | None, run: RunRandom, context: Context) -> None:
        super().__init__(stage, random)
        self._run = run
        self._context = context

    def forward(self, inputs: Batch) -> Batch:
        stage = self._stage
        self.inputs = inputs
        spare = cloned(inputs) if stage.may_change_input else None
        before = versions(inputs)
        self._training = training_flags(stage.module)
        with checkpointing(), stage.buffers.watched(self._training) as self._buffers:
            outputs = cut(self._compute(inputs))
        self._witness = Witness(stage.module, self._training, stage.buffers.steady(self._training))
        if versions(inputs) != before:
            self.inputs = _expect_spare(spare)
        self._versions = versions(self.inputs)
        return outputs

    def recompute(self) -> None:
        """Run the layers again as they ran in the forward, for their graph."""
        self._check_inputs()
        self._witness.check()
        restored = self._stage.buffers.restored(self._training, self._buffers)
        with self._context.applied(), recomputing(), restored, self._repeated():
            self._outputs = self._stage.compute(self.inputs)

    def _repeated(self) -> AbstractContextManager[None]:
        if self._random is None and self._run.unexpected:
            self._random = Refusal(self._run, 0, self._stage.device)
        return _NOTHING if self._random is None else self._random.repeated()

    def _check_inputs(self) -> None:
        if versions(self.inputs) != self._versions:
            raise RuntimeError(
                "the input of this partition was changed in place after its forward, and its recomputation needs it as "
                "it was; change a clone instead, or use checkpoint='never'"
            )


def _expect_spare(spare: Batch | None) -> Batch:
    if spare is None:
        raise RuntimeError(
            "the layers of this partition changed their input in place on this micro-batch but not on the ones before, "
            "so that it is gone for the recomputation; let them work on a clone, or use checkpoint='never'"
        )
    return spare
