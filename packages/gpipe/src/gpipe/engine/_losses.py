"""Compute the loss of a mini-batch from the outputs of the last stage; here, one loss per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from microbatch import concatenate

from .._cached_property import cached_property
from .._current import doing
from ..checkpoint._random import CellRNG
from ..values._leaves import Activation, as_nonleaf, clone_leaves, versions
from ..values._sharing import clone_preserved, copy_uncounted, refuse_shared_changes
from ._accumulate import DeferredGradients, GradientSums, find_leaves
from ._explained import explain_second_backward
from ._loss_value import LossFunction, LossValue, expect_trains, loss_value, metrics_of_all, plain_metrics
from ._scale import HALVES, Scale, compute_scale, sum_counts
from ._tied import Tied


class Losses:
    """Receives the outputs of the last stage, and returns their gradients.

    Args:
        loss_fn: the loss function.
        keep_outputs: whether to keep the detached outputs.

    Attributes:
        is_whole: whether the loss is computed once, on the outputs of all micro-batches.
        replays: whether ``loss_fn`` runs a model once more, on the outputs of its blocks.
        is_sum: whether that loss is a :class:`LossSum`; known once it is computed.
        trains: whether to compute gradients as well.
        outputs: the detached outputs of the last stage, by micro-batch, if they are kept.
        loss: the loss of the mini-batch, detached.
        metrics: the metrics that ``loss_fn`` returned with the loss, or None.
        scales: whether gradients must be multiplied by ``scale`` at the end; known once the first loss is computed.
        scale: the factor of all gradients, known once the last loss is computed.
    """

    is_whole: Any = False
    replays: Any = False
    is_sum: Any = False
    scales: Any = False
    scale: Any = 1.0
    loss: Any
    metrics: Any = None

    def __init__(self, loss_fn: LossFunction, *, keep_outputs: bool = False) -> None:
        self._loss_fn = loss_fn
        self._keep_outputs = keep_outputs
        self._gradients: dict[int, list[Tensor | None]] = {}
        self.trains = False
        self.outputs: dict[int, Activation] = {}

    def finding(self) -> Any:
        """Return a finding about losses of this kind that other processes need, or None."""
        return None

    def begin(
        self,
        random: Callable[[int], CellRNG],
        tied: Tied,
        deferred: DeferredGradients,
        sums: GradientSums,
        *,
        trains: bool,
    ) -> None:
        """Begin the only run.

        Args:
            random: returns the random numbers of a micro-batch, as for a layer after the last one.
            tied: the tensors that stages share.
            deferred: holds ``.grad`` and hooks of leaves of the stages and the loss.
            sums: holds the gradients of leaves of the loss until the run ends.
        """
        self._random, self._tied, self._deferred, self._sums, self.trains = random, tied, deferred, sums, trains

    def take(self, i: int, activation: Activation) -> None:
        """Take the outputs of a micro-batch, which are leaves."""
        raise NotImplementedError

    def pop_gradients(self, i: int) -> list[Tensor | None]:
        """Return the gradients of the outputs of a micro-batch, once."""
        # Removed here, so that they are freed with the backward of the cell rather than with the run.
        return self._gradients.pop(i)

    def compute_whole(self) -> None:
        """Compute the loss of the full mini-batch; this is an action of the schedule."""
        raise NotImplementedError

    def _value(self, i: int, outputs: Activation, arguments: Sequence[Any]) -> LossValue:
        """Call ``loss_fn`` on ``outputs``, which are leaves."""
        before, uncounted = (versions(outputs), copy_uncounted(outputs)) if outputs.marks else ([], [])
        # Separate random numbers, so that a loss that draws them does not affect the layers.
        with doing(rng=self._random(i)):
            value = loss_value(self._loss_fn(as_nonleaf(outputs).value, *arguments))
        if outputs.marks:
            refuse_shared_changes("loss_fn", outputs, before, uncounted)
        if self.trains:
            expect_trains(value.total)
        return value

    def _backward(self, loss: Tensor, seed: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of ``leaves``; keep the gradients of other leaves, such as loss parameters, until the
        run ends.
        """
        graph = find_leaves([loss], leaves)
        if graph.hides:
            raise RuntimeError(
                "loss_fn uses torch.utils.checkpoint with use_reentrant=True, or another pipe, whose backward adds to "
                ".grad by itself, before the run is complete; use use_reentrant=False, or pipe(input) and backward()"
            )
        self._tied.expect_once(graph.leaves)
        # Workers may be adding to .grad of the same leaves now, and hooks wait for complete gradients. So the sums are
        # kept separately, and added at the end of the run.
        self._deferred.hold(graph.leaves)
        try:
            return self._sums.backward((loss,), (seed,), graph, leaves)
        except RuntimeError as error:
            if (found := explain_second_backward(error)) is not None:
                raise found from error
            raise

    def _keep(self, i: int, outputs: Activation) -> None:
        if self._keep_outputs:
            self.outputs[i] = outputs.with_tensors(map(Tensor.detach, outputs.tensors))


class MicrobatchLosses(Losses):
    """One loss per micro-batch, if the losses can be combined. Frees each output once its loss is computed.

    Args:
        arguments: the further arguments of ``loss_fn`` per micro-batch: its target, or nothing.
        weights: the weights of the losses in the loss of the mini-batch, numbers or tensors. None if ``loss_fn``
            returns a :class:`LossSum`: then the sum of all totals is divided by the sum of all counts.
        rows: the number of rows of each micro-batch, used to average metrics.
        unlike: returns the error for a loss that does not match ``weights``.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        arguments: Sequence[tuple[Any, ...]],
        weights: Sequence[Any] | None,
        rows: Sequence[tuple[int, ...]],
        *,
        unlike: Callable[[LossValue], ValueError],
        keep_outputs: bool = False,
    ) -> None:
        super().__init__(loss_fn, keep_outputs=keep_outputs)
        self._arguments, self._weights, self._rows, self._unlike = arguments, weights, rows, unlike
        self.scales = weights is None
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Any] = {}
        self._metrics: dict[int, dict[str, Any]] = {}

    def take(self, i: int, activation: Activation) -> None:
        # loss_fn may modify it in place, although the caller or a recomputation needs the original.
        outputs = clone_leaves(activation) if self._keep_outputs else clone_preserved(activation)
        self._keep(i, activation)
        value = self._value(i, outputs, self._arguments[i])
        weight = self._take(i, value)
        if self.trains:
            self._gradients[i] = self._backward(
                value.total, build_initial_gradient(value.total, weight), outputs.tensors
            )

    def _take(self, i: int, value: LossValue) -> Any:
        """Store the loss, the count and the metrics of a micro-batch; return the weight of its loss."""
        if (value.count is None) != (self._weights is not None):
            raise self._unlike(value)
        if self._losses and (value.metrics is None) == bool(self._metrics):
            raise ValueError("loss_fn returned metrics for some micro-batches only; return the same for all")
        if value.metrics is not None:
            self._metrics[i] = plain_metrics(value.metrics)
            if len(self._metrics) == len(self._rows):  # here, so that an error belongs to this cell
                self.metrics = metrics_of_all([self._metrics[i] for i in sorted(self._metrics)], self._rows)
        if value.count is not None:
            self._counts[i] = value.count
        weight = 1.0 if self._weights is None else self._weights[i]
        self._losses[i] = (value.total.detach() * weight).to(value.total.dtype)
        return weight

    @cached_property
    def _count(self) -> float | Tensor:
        # By micro-batch instead of arrival, because a sum of floats depends on its order.
        return sum_counts([self._counts[i] for i in sorted(self._counts)]) if self._counts else 1.0

    @cached_property
    def scale(self) -> Scale:
        return compute_scale(self._count)

    @property
    def loss(self) -> Tensor:
        losses = concatenate([self._losses[i].reshape(1) for i in sorted(self._losses)])
        # In half precision, the sum over all micro-batches may overflow even if the mean does not.
        whole = losses.sum(dtype=torch.float32 if losses.dtype in HALVES else None)
        return (whole / self._count).to(losses.dtype)


def build_initial_gradient(total: Tensor, factor: Any) -> Tensor:
    """Return the initial gradient of ``total`` for training on ``factor`` times ``total``."""
    return factor.to(total.dtype).expand_as(total) if isinstance(factor, Tensor) else torch.full_like(total, factor)
