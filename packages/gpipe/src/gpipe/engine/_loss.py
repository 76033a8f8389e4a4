"""The far end of a training step: where a micro-batch becomes a loss, and turns around as a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch

from ..checkpoint._random import CellRNG, RunRNG
from ..values._aliases import unpacked
from ..values._leaves import as_nonleaf, map_batch
from ..values._sharing import guarded, released
from . import _autograd_calls as _engine
from ._accumulate import AccumulatedGradients
from ._deferred_gradients import DeferredGradients
from ._draws import Draws
from ._graph_leaves import below
from ._scale import Scale, scale_of, scaled

LossFunction = Callable[[Any, Any], Any]
"""From an output and a target to a scalar loss, or to the sum of losses and their count."""

_CPU = torch.device("cpu")


class LossStage:
    """Takes the outputs of the last stage as its neighbour would, and has their gradients ready at once.

    Args:
        loss_fn: called with the output and the target of each micro-batch.
        targets: one for each micro-batch.
        weights: what the loss of each micro-batch counts in the whole.
        keep_outputs: let no output go; else each goes with its micro-batch.

    Attributes:
        held: leaves whose ``.grad`` and hooks are out of reach during the run, of the loss and of all stages.
        grown: gradients of leaves of the loss that are not in ``.grad`` yet.
        outputs: of the last stage, by micro-batch, detached, if they are kept.
    """

    def __init__(
        self, loss_fn: LossFunction, targets: Sequence[Any], weights: Sequence[float], *, keep_outputs: bool = False
    ) -> None:
        self._loss_fn = loss_fn
        self._targets = targets
        self._weights = weights
        self._keep_outputs = keep_outputs
        self._losses: list[Tensor] = []
        self._counts: list[Any] = []
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._filled: dict[Tensor, bool] = {}
        self.held = DeferredGradients()
        self.grown = AccumulatedGradients()
        self.outputs: dict[int, Batch] = {}

    def begin(self, rng: RunRNG, number: int, draws: Draws) -> None:
        """A run begins.

        Args:
            rng: where random numbers come from.
            number: as if the loss was a layer of the model after all others.
            draws: what is known of losses of this pipe.
        """
        self._rng, self._number, self._draws = rng, number, draws
        draws.begin(_kind(self._loss_fn))

    def put_values(self, i: int, batch: Batch) -> None:
        """Compute the loss of a micro-batch, and the gradients of what it was computed from."""
        drawing = self._draws.drawing
        if drawing:
            with self._draws.learning(CellRNG(self._rng, i, self._number, _CPU, drawing)):
                self._turn(i, batch)
        else:
            self._turn(i, batch)
        if len(self._losses) == len(self._targets):
            self._draws.saw_all()

    def _turn(self, i: int, batch: Batch) -> None:
        batch = released(batch)
        found = self._loss_fn(unpacked(guarded(as_nonleaf(batch)).value), self._targets[i])
        self._expect_alike(isinstance(found, tuple))
        loss, weight = self._counted(found) if isinstance(found, tuple) else (_checked(found), self._weights[i])
        self._gradients[i] = self._backward(loss, torch.full_like(loss, weight), list(batch))
        self._losses.append(loss.detach() * weight)
        if self._keep_outputs:
            self.outputs[i] = map_batch(batch, Tensor.detach)

    def get_gradients(self, i: int) -> list[Tensor | None]:
        """The gradients of the outputs of a micro-batch."""
        return self._gradients.pop(i)

    def _backward(self, loss: Tensor, seed: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
        """The gradients of ``leaves``; those of all else that the loss was computed from are kept for the end.

        Such as the parameters of a loss that is a module, or those of the pipe, to which other workers are just adding.
        """
        graph = below([loss], leaves)
        if graph.hides:
            self._hold_hidden(graph.leaves)
        elif graph.leaves:
            self._hold(graph.leaves)
            return self.grown.backward((loss,), (seed,), graph, leaves)
        _engine.accumulate((loss,), (seed,))
        return [leaf.grad for leaf in leaves]

    def _hold(self, leaves: Iterable[Tensor], *, every: bool = False) -> None:
        self._filled.update({leaf: leaf.grad is not None for leaf in leaves if leaf not in self._filled})
        self.held.hold(leaves, every=every)

    def _hold_hidden(self, leaves: Sequence[Tensor]) -> None:
        """Before the backward of a loss that adds to ``.grad`` by itself, inside of a reentrant checkpoint."""
        if self.scales and not isinstance(self._loss_fn, nn.Module):
            raise RuntimeError(
                "loss_fn returned (sum, count) and uses torch.utils.checkpoint with use_reentrant=True, which hides "
                "what it trains, so that it could not be divided by the count; use use_reentrant=False"
            )
        own = self._loss_fn.parameters() if isinstance(self._loss_fn, nn.Module) else ()
        self._hold([*leaves, *own], every=self.scales)

    def restore(self) -> None:
        """After a failure: leaves of the loss that had no gradient have none."""
        for leaf, filled in self._filled.items():
            if not filled:
                leaf.grad = None

    @property
    def scales(self) -> bool:
        """Whether the losses say themselves what they count; known once the first has been computed."""
        return bool(self._counts)

    @cached_property
    def scale(self) -> Scale:
        """What all gradients are still to be multiplied by; to be asked once the last micro-batch has been seen."""
        return scale_of(self._counts) if self._counts else 1.0

    @property
    def loss(self) -> Tensor:
        """The loss of the whole mini-batch, detached."""
        return scaled(torch.stack(self._losses).sum(), self.scale)

    def _expect_alike(self, counted: bool) -> None:
        if self._losses and counted != self.scales:
            raise ValueError(
                "loss_fn returned (sum, count) for some micro-batches and a scalar for others, which have no common "
                "mean; return the same for all"
            )

    def _counted(self, found: tuple[Any, ...]) -> tuple[Tensor, float]:
        if len(found) != 2:
            raise ValueError(f"loss_fn returned a tuple of {len(found)}; expected a scalar loss, or (sum, count)")
        total, count = found
        _expect_number(count)
        self._counts.append(count)
        return _checked(total), 1.0


def _kind(loss_fn: LossFunction) -> tuple[object, object]:
    """What tells whether a loss may draw like one before: of functions the code, since each step may make its own."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    return getattr(loss_fn, "__code__", type(loss_fn)), getattr(owner, "training", None)


def _expect_number(count: object) -> None:
    """ValueError or TypeError unless ``count`` is one real number that nothing is trained through."""
    if not isinstance(count, Tensor | Real) or (isinstance(count, Tensor) and count.is_complex()):
        kind = count.dtype if isinstance(count, Tensor) else type(count).__name__
        raise TypeError(f"loss_fn returned a count of {kind}; expected a real number, or a tensor of one")
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"loss_fn returned a count of shape {tuple(count.shape)}; expected one number: take its sum")
    if isinstance(count, Tensor) and count.requires_grad:
        raise ValueError(
            "loss_fn returned a count that requires grad, but gradients flow through the sum only, since the count of "
            "the whole is not known when they do; return (sum, count.detach()) if it is to be a constant, else use "
            "pipe(input) and backward()"
        )


def _checked(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}; expected a scalar tensor, or (sum, count)")
    if loss.dim():
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; expected a scalar: take its mean, or return "
            "(loss.sum(), loss.numel())"
        )
    if loss.is_complex():
        raise TypeError(f"loss_fn returned {loss.dtype}; expected a real scalar: take its .real or .abs()")
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that does not require grad: it does not depend on the output, or no parameter "
            "requires grad; use pipe(input) to compute without training"
        )
    return loss
