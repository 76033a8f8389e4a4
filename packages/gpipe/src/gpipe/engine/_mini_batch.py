"""The mini-batch of a run, which all its stages share."""

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
    """A mini-batch, its micro-batches, and what all of its cells need.

    Args:
        stages: the stages that it goes through.
        placement: the worker of each stage.
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed, if there is a backward.
        loss: computes the losses of micro-batches, if the run includes them.
        rng: the random numbers of the run.

    Attributes:
        size: what the order of steps depends on: micro-batches, checkpoint stops, and the worker of each stage.
        keeps: whether a backward follows; if not, no cell is kept.
        context: the settings of the thread that called the forward, for workers and recomputations.
        rng: the random numbers of the run.
        deferred: removes ``.grad`` and hooks of leaves, of all stages, while gradients accumulate outside ``.grad``.
        accumulated: the gradients that accumulate outside ``.grad``.
        parameters: those of all stages when the run begins; none if no backward follows.
        kept_nodes: those whose ``AccumulateGrad`` node other code refers to; it must run once, with the whole
            gradient.
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
        self.parameters = [p for stage in stages for p in parameters_of(stage.module)] if self.keeps else []
        self.kept_nodes: list[Tensor] = kept(self.parameters)
        self.deferred = DeferredGradients() if loss is None else loss.held
        self.accumulated = [] if loss is None else [loss.grown]

    def accumulated_outside(self, stage: Stage) -> AccumulatedGradients | None:
        """Collects the gradients of ``stage`` outside ``.grad``; None if they are added to ``.grad`` at once."""
        own = {id(parameter) for parameter in parameters_of(stage.module)}
        if own.isdisjoint(map(id, self.kept_nodes)):
            return None
        self.accumulated.append(AccumulatedGradients())
        return self.accumulated[-1]


def callers_context() -> Context:
    """The settings of this thread, except that backwards inside a layer or cell stay on their worker."""
    with torch.autograd.set_multithreading_enabled(False):
        return Context.capture()
