"""The losses of micro-batches, computed where the last stage sends its outputs, and the loss of the mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from microbatch import concatenate

from .._current import current
from ..checkpoint._random import CellRNG, RunRNG
from ..values._leaves import Activation, as_nonleaf, versions
from ..values._sharing import owned, refuse_shared_changes, uncounted_of
from ._accumulate import DeferredGradients, GradientSums, below
from ._loss_value import LossFunction, LossValue, expect_trains, loss_value, metrics_of_all, plain_metrics
from ._scale import HALVES, Scale, scale_of, sum_of
from ._tied import Tied


class Losses:
    """Takes the outputs of the last stage as a channel would, and frees each when its loss is computed.

    Args:
        arguments: for each micro-batch, the further arguments of ``loss_fn``: its target, or nothing.
        weights: the weight of each micro-batch in the loss of the mini-batch.
        rows: the number of rows of each micro-batch.
        is_mean: whether ``loss_fn`` may return a count, by which losses are combined instead of by ``weights``.

    Attributes:
        deferred: leaves of the loss and of all stages whose ``.grad`` and hooks are removed during the run.
        sums: gradients of leaves of the loss that have not been added to ``.grad`` yet.
        outputs: the detached outputs of the last stage, by micro-batch, if they are kept.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        arguments: Sequence[tuple[Any, ...]],
        weights: Sequence[float],
        rows: Sequence[tuple[int, ...]],
        *,
        keep_outputs: bool = False,
        is_mean: bool = True,
    ) -> None:
        self._loss_fn = loss_fn
        self._arguments = arguments
        self._weights = weights
        self._keep_outputs = keep_outputs
        self._is_mean = is_mean
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Any] = {}
        self._metrics: dict[int, dict[str, Any]] = {}
        self._rows = rows
        self._whole: dict[str, Any] | None = None
        self.deferred = DeferredGradients()
        self.sums = GradientSums()
        self.outputs: dict[int, Activation] = {}

    def begin(self, rng: RunRNG, number: int, tied: Tied) -> None:
        """Begin a run. The loss draws random numbers as layer ``number`` would, behind all layers of the model."""
        self._rng, self._number, self._tied = rng, number, tied

    def put_values(self, i: int, activation: Activation) -> None:
        # Numbers of its own, so that a loss that draws changes nothing in the layers.
        current.rng = CellRNG(self._rng, i, self._number)
        # loss_fn may work in place on it, and the caller or a recomputation may need the memory as it is.
        self._compute(i, owned(activation))
        current.rng = None

    def get_gradients(self, i: int) -> list[Tensor | None]:
        # Freed with the backward of the cell, not with the run.
        return self._gradients.pop(i)

    def _compute(self, i: int, outputs: Activation) -> None:
        self._take(i, outputs, self._value(i, outputs))

    def _value(self, i: int, outputs: Activation) -> LossValue:
        before, uncounted = (versions(outputs), uncounted_of(outputs)) if outputs.marks else ([], [])
        value = loss_value(self._loss_fn(as_nonleaf(outputs).value, *self._arguments[i]))
        if outputs.marks:
            refuse_shared_changes("loss_fn", outputs, before, uncounted)
        return value

    def _take(self, i: int, outputs: Activation, value: LossValue) -> float:
        """Keep the loss, the count and the metrics of a micro-batch; return the weight of its loss."""
        self._expect_alike(value)
        if value.metrics is not None:
            self._metrics[i] = plain_metrics(value.metrics)
            if len(self._metrics) == len(self._rows):  # here, so that an error is one of this cell
                self._whole = metrics_of_all([self._metrics[i] for i in sorted(self._metrics)], self._rows)
        if value.count is not None:
            self._counts[i] = value.count
        weight = self._weights[i] if value.count is None else 1.0
        self._losses[i] = value.total.detach() * weight
        if self._keep_outputs:
            self.outputs[i] = outputs.with_tensors(map(Tensor.detach, outputs.tensors))
        return weight

    @property
    def scales(self) -> bool:
        """Whether ``loss_fn`` returns a count; known once the first loss has been computed."""
        return bool(self._counts)

    @cached_property
    def _count(self) -> float | Tensor:
        # By micro-batch, and not in the order of arrival: a sum of floats depends on its order.
        return sum_of([self._counts[i] for i in sorted(self._counts)]) if self._counts else 1.0

    @cached_property
    def scale(self) -> Scale:
        """The factor by which all gradients must still be multiplied; known once the last micro-batch is done."""
        return scale_of(self._count)

    @property
    def loss(self) -> Tensor:
        losses = concatenate([self._losses[i].reshape(1) for i in sorted(self._losses)])
        # In half precision the sum of all micro-batches may overflow although the mean does not.
        whole = losses.sum(dtype=torch.float32 if losses.dtype in HALVES else None)
        return (whole / self._count).to(losses.dtype)

    @property
    def metrics(self) -> dict[str, Any] | None:
        return self._whole

    def _expect_alike(self, value: LossValue) -> None:
        if value.count is not None and not self._is_mean:
            raise ValueError(
                "loss_fn returned (sum, count), by which losses are combined, beside reduction='sum'; return the sum "
                "alone, or leave out reduction= and normalizer="
            )
        if self._losses and (value.count is not None) != self.scales:
            raise ValueError(
                "loss_fn returned (sum, count) for some micro-batches and a scalar for others, which have no common "
                "mean; return the same for all"
            )
        if self._losses and (value.metrics is None) == bool(self._metrics):
            raise ValueError("loss_fn returned metrics for some micro-batches only; return the same for all")


class LossStage(Losses):
    """Computes the losses of micro-batches and the gradients of the outputs."""

    def _compute(self, i: int, outputs: Activation) -> None:
        value = self._value(i, outputs)
        expect_trains(value.total)
        weight = self._take(i, outputs, value)
        self._gradients[i] = self._backward(value.total, torch.full_like(value.total, weight), outputs.tensors)

    def _backward(self, loss: Tensor, seed: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of ``leaves``. Those of other leaves, such as parameters of the loss, are kept until the run
        ends.
        """
        graph = below([loss], leaves)
        if graph.hides:
            raise RuntimeError(
                "loss_fn uses torch.utils.checkpoint with use_reentrant=True, or another pipe, whose backward adds to "
                ".grad by itself, one micro-batch after the other; use use_reentrant=False, or pipe(input) and "
                "backward()"
            )
        self._tied.expect_once(graph.leaves)
        # Workers may be adding to .grad of the same leaves at this moment, and hooks wait for whole gradients: so the
        # sums are kept apart, and added at the end of the run.
        self.deferred.hold(graph.leaves)
        return self.sums.backward((loss,), (seed,), graph, leaves)
