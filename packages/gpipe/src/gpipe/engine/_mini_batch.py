"""What the stages of a run have in common: the mini-batch that they work on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streams import Context

from ..checkpoint._random import RunRNG
from ._accumulate import AccumulatedGradients
from ._deferred_gradients import DeferredGradients, kept
from ._losses import Losses
from ._parameters import parameters_of
from ._stage import Stage


class MiniBatch:
    """A mini-batch in so many micro-batches, and what holds for all of its cells.

    Args:
        stages: that it goes through.
        placement: the worker of each stage.
        checkpoint_stops: of each stage; micro-batches below it are checkpointed, if a backward will come.
        loss: where micro-batches end, or turn around, if they do so inside the run.
        rng: where the random numbers of the run come from.

    Attributes:
        size: what a walk depends on: micro-batches, checkpoint stops, and the worker of each stage.
        keeps: whether a backward will come; if not, no cell is kept.
        context: what the caller of the forward saw, for workers and recomputations.
        rng: the same.
        deferred: takes care of leaves whose gradients accumulate out of sight, of all stages.
        accumulated: gradients that are kept out of ``.grad`` until they are whole.
        kept_nodes: parameters with a node in autograd that somebody keeps, which must run once, with the whole sum.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        placement: tuple[int, ...],
        microbatches: int,
        checkpoint_stops: tuple[int, ...],
        loss: Losses | None,
        rng: RunRNG,
    ) -> None:
        self.microbatches = microbatches
        self.keeps = torch.is_grad_enabled()
        self.checkpoint_stops = checkpoint_stops if self.keeps else (0,) * len(checkpoint_stops)
        self.size = microbatches, self.checkpoint_stops, placement
        self.context = callers_context()
        self.rng = rng
        self.loss = loss
        self.kept_nodes: list[Tensor] = []
        if self.keeps:
            self.kept_nodes = kept([p for stage in stages for p in parameters_of(stage.module)])
        self.deferred = DeferredGradients() if loss is None else loss.held
        self.accumulated = [] if loss is None else [loss.grown]

    def stop_of(self, stage: Stage) -> int:
        """The first micro-batch that ``stage`` does not checkpoint."""
        if stage.recomputed is None:
            return self.checkpoint_stops[stage.partition]
        return self.microbatches if stage.recomputed and self.keeps and stage.module.training else 0

    def accumulated_outside(self, stage: Stage) -> AccumulatedGradients | None:
        """Where gradients of ``stage`` accumulate before they go to ``.grad``; None if they may go there at once."""
        own = {id(parameter) for parameter in parameters_of(stage.module)}
        if own.isdisjoint(map(id, self.kept_nodes)):
            return None
        self.accumulated.append(AccumulatedGradients())
        return self.accumulated[-1]


def callers_context() -> Context:
    """What this thread sees, except that every backward inside a layer or cell stays on its worker."""
    with torch.autograd.set_multithreading_enabled(False):
        return Context.capture()
