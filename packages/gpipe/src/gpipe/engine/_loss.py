"""The last stage of a training step: computes the loss of each micro-batch, and the gradient of its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..values._leaves import Activation
from . import _autograd_calls as _engine
from ._graph_leaves import below
from ._loss_value import expect_trains
from ._losses import Losses


class LossStage(Losses):
    """Computes the losses of micro-batches and the gradients of the outputs. Arguments as for :class:`Losses`."""

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
            raise RuntimeError(
                "loss_fn uses torch.utils.checkpoint with use_reentrant=True, or another pipe, whose backward adds to "
                ".grad by itself, one micro-batch after the other; use use_reentrant=False, or pipe(input) and "
                "backward()"
            )
        if graph.leaves:
            self.deferred.hold(graph.leaves)
            return self.sums.backward((loss,), (seed,), graph, leaves)
        _engine.accumulate((loss,), (seed,))
        return [leaf.grad for leaf in leaves]
