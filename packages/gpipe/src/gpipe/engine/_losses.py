"""What stands behind the last stage: losses of micro-batches, and of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..checkpoint._random import CellRNG, RunRNG
from ..values._aliases import unpacked
from ..values._leaves import Activation, as_nonleaf
from ..values._sharing import guarded, released
from ._accumulate import AccumulatedGradients
from ._deferred_gradients import DeferredGradients
from ._draws import Draws
from ._loss_value import LossFunction, LossValue, loss_value
from ._metrics import Metrics
from ._scale import Scale, scale_of, scaled

_CPU = torch.device("cpu")


class Losses:
    """Takes the outputs of the last stage as its neighbour would, and lets each go once its loss is known.

    Args:
        loss_fn: called with the output of each micro-batch, and what is in ``arguments``.
        arguments: what comes after the output, for each micro-batch: its target, or nothing.
        weights: what the loss of each micro-batch counts in the whole.
        rows: how many rows went into each micro-batch.
        keep_outputs: let no output go.

    Attributes:
        held: leaves whose ``.grad`` and hooks are out of reach during the run, of the loss and of all stages.
        grown: gradients of leaves of the loss that are not in ``.grad`` yet.
        outputs: of the last stage, by micro-batch, detached, if they are kept.
        undoes: if a failure is to leave every ``.grad`` as it was, the identities of the parameters of the pipe.
    """

    undoes: frozenset[int] | None = None

    def __init__(
        self,
        loss_fn: LossFunction,
        arguments: Sequence[tuple[Any, ...]],
        weights: Sequence[float],
        rows: Sequence[tuple[int, ...]],
        *,
        keep_outputs: bool = False,
    ) -> None:
        self._loss_fn = loss_fn
        self._arguments = arguments
        self._weights = weights
        self._keep_outputs = keep_outputs
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Any] = {}
        self._metrics: Metrics | None = None
        self._rows = rows
        self.held = DeferredGradients()
        self.grown = AccumulatedGradients()
        self.outputs: dict[int, Activation] = {}

    def begin(self, rng: RunRNG, number: int, draws: Draws) -> None:
        """A run begins.

        Args:
            rng: where random numbers come from.
            number: as if the loss was a layer of the model after all others.
            draws: what is known of losses of this pipe.
        """
        self._rng, self._number, self.draws = rng, number, draws
        draws.begin(_kind(self._loss_fn))

    def hold_others(self, leaves: Iterable[Tensor]) -> None:
        """Hold those of ``leaves`` that are no parameters of the pipe, before a backward adds to them."""
        assert self.undoes is not None
        self.held.hold([leaf for leaf in leaves if id(leaf) not in self.undoes], every=True)

    def put_values(self, i: int, activation: Activation) -> None:
        """Compute the loss of a micro-batch."""
        drawing = self.draws.drawing
        if drawing:
            with self.draws.learning(CellRNG(self._rng, i, self._number, _CPU, drawing)):
                self._compute(i, released(activation))
        else:
            self._compute(i, released(activation))
        if len(self._losses) == len(self._arguments):
            self.draws.saw_all()

    def get_gradients(self, i: int) -> list[Tensor | None]:
        """The gradients of the outputs of a micro-batch, in training."""
        return self._gradients.pop(i)

    def _compute(self, i: int, outputs: Activation) -> None:
        self._take(i, outputs, self._value(i, outputs))

    def _value(self, i: int, outputs: Activation) -> LossValue:
        return loss_value(self._loss_fn(unpacked(guarded(as_nonleaf(outputs)).value), *self._arguments[i]))

    def _take(self, i: int, outputs: Activation, value: LossValue) -> float:
        """Remember what is known of a micro-batch; what its loss counts in the whole."""
        self._expect_alike(value)
        if value.metrics is not None:
            self._metrics = self._metrics or Metrics(self._rows)
            self._metrics.add(i, value.metrics)
        if value.count is not None:
            self._counts[i] = value.count
        weight = self._weights[i] if value.count is None else 1.0
        self._losses[i] = value.total.detach() * weight
        if self._keep_outputs:
            self.outputs[i] = outputs.with_tensors(map(Tensor.detach, outputs.tensors))
        return weight

    @property
    def scales(self) -> bool:
        """Whether the losses say themselves what they count; known once the first has been computed."""
        return bool(self._counts)

    @cached_property
    def scale(self) -> Scale:
        """What all gradients are still to be multiplied by; to be asked once the last micro-batch has been seen."""
        return scale_of([self._counts[i] for i in sorted(self._counts)]) if self._counts else 1.0

    @property
    def loss(self) -> Tensor:
        """The loss of the whole mini-batch, detached; the same whatever the order of micro-batches was."""
        return scaled(torch.stack([self._losses[i] for i in sorted(self._losses)]).sum(), self.scale)

    @property
    def metrics(self) -> dict[str, Any] | None:
        """Those of the whole mini-batch, if the loss function gives any."""
        return None if self._metrics is None else self._metrics.whole()

    def _expect_alike(self, value: LossValue) -> None:
        if self._losses and (value.count is not None) != self.scales:
            raise ValueError(
                "loss_fn returned (sum, count) for some micro-batches and a scalar for others, which have no common "
                "mean; return the same for all"
            )
        if self._losses and (value.metrics is None) != (self._metrics is None):
            raise ValueError("loss_fn returned metrics for some micro-batches only; return the same for all")


def _kind(loss_fn: LossFunction) -> tuple[object, object]:
    """What tells whether a loss may draw like one before: of functions the code, since each step may make its own."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    return getattr(loss_fn, "__code__", type(loss_fn)), getattr(owner, "training", None)
