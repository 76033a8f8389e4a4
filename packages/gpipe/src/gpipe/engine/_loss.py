"""The last stage of a training step: computes the loss of each micro-batch, and the gradient of its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..values._leaves import Activation
from . import _autograd_calls as _engine
from ._graph_leaves import below
from ._loss_value import expect_trains
from ._losses import Losses


class LossStage(Losses):
    """Computes the losses of micro-batches and the gradients of the outputs. Arguments as for :class:`Losses`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._filled: dict[Tensor, bool] = {}

    def _compute(self, i: int, outputs: Activation) -> None:
        value = self._value(i, outputs)
        expect_trains(value.total)
        weight = self._take(i, outputs, value)
        self._gradients[i] = self._backward(value.total, torch.full_like(value.total, weight), outputs.tensors)

    def _backward(self, loss: Tensor, seed: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of ``leaves``. Those of other leaves of the loss are kept until the end of the run.

        Other leaves are the parameters of a loss that is a module, or parameters of the pipe, to which workers are
        adding.
        """
        graph = below([loss], leaves)
        if graph.hides:
            self._hold_hidden(graph.leaves)
        elif graph.leaves:
            self._hold(graph.leaves)
            return self.sums.backward((loss,), (seed,), graph, leaves)
        _engine.accumulate((loss,), (seed,))
        return [leaf.grad for leaf in leaves]

    def _hold(self, leaves: Iterable[Tensor], *, every: bool = False) -> None:
        self._filled.update({leaf: leaf.grad is not None for leaf in leaves if leaf not in self._filled})
        self.deferred.hold(leaves, every=every)

    def _hold_hidden(self, leaves: Sequence[Tensor]) -> None:
        """Before the backward of a loss with a reentrant checkpoint, which adds to ``.grad`` by itself: hold its
        leaves.
        """
        if self.scales and not isinstance(self._loss_fn, nn.Module):
            raise RuntimeError(
                "loss_fn returned (sum, count) and uses torch.utils.checkpoint with use_reentrant=True, which hides "
                "what it trains, so that it could not be divided by the count; use use_reentrant=False"
            )
        own = self._loss_fn.parameters() if isinstance(self._loss_fn, nn.Module) else ()
        self._hold([*leaves, *own], every=self.scales)

    def restore(self) -> None:
        """After a failure: set ``.grad`` of leaves of the loss that had none back to None."""
        for leaf, filled in self._filled.items():
            if not filled:
                leaf.grad = None
