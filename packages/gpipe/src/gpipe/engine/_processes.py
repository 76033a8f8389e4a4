"""The processes that train together: those that have stages of a pipe, and those that average its gradients.

One process has all stages, unless :mod:`gpipe.distributed` brings others.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint._random import RunRNG
from ..transport._transport import Channel
from ._failures import Failures
from ._losses import Losses
from ._settings import RunObserver


class RunState(NamedTuple):
    """What other processes learn of a run in this one.

    Attributes:
        trains: whether there are backwards.
        failures: those of this process, and the earliest that others have told of.
        rng: its random numbers, and whether layers have drawn any.
        loss: computes the loss, if the run has any.
        observer: has recorded the actions of this process.
    """

    trains: bool
    failures: Failures
    rng: RunRNG
    loss: Losses | None
    observer: RunObserver | None


class Processes:
    """What a pipe does together with other processes: nothing, if this one has all stages.

    Attributes:
        ranks: the process of each stage; None if this one has all.
        me: the number of this process among them; None if there are no others.
    """

    ranks: tuple[int, ...] | None = None
    me: int | None = None

    def channel(self, number: int, run: RunState) -> Channel | None:
        """The channel of that number for a run, if its other end is in another process."""
        return None

    def together(self, run: RunState) -> AbstractContextManager[None]:
        """A context for a whole run, at the end of which all processes meet."""
        return nullcontext()

    def shared(self, module: nn.Module) -> list[Tensor]:
        """The leaves in ``module`` that other processes use too: their gradients are summed over the processes."""
        return []

    def summed(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The ``gradients`` of this process, and those of the leaves that others use too summed over the processes."""
        return gradients


ALONE: Final = Processes()
"""The only process of a pipe."""


def may_be_data_parallel() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_data_parallel(parameters: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a ``DistributedDataParallel`` that averages gradients has any of ``parameters``.

    Its hooks do nothing unless its own forward has run before: gradients would silently be those of this process alone.
    """
    if not parameters or not may_be_data_parallel():
        return
    wanted = {id(parameter) for parameter in parameters}
    # The wrapper is outside of the pipe, which has no reference to it, and torch has no list of wrappers. This look at
    # all objects takes long; it happens only if something refers to the node of a parameter.
    kind = torch.nn.parallel.DistributedDataParallel
    # By type(): isinstance() asks objects for their __class__, which runs code of proxies.
    every = gc.get_objects()
    kinds = {each for each in set(map(type, every)) if issubclass(each, kind)}
    around = [each for each in every if type(each) in kinds and each.require_backward_grad_sync] if kinds else []
    if any(not wanted.isdisjoint(map(id, each.parameters())) for each in around):
        raise RuntimeError(
            "step() does not go through the forward of the DistributedDataParallel around this pipe, which would not "
            "average its gradients; call ddp(input) and backward(), or use step() under ddp.no_sync() or without "
            "DistributedDataParallel, and call gpipe.distributed.average_gradients(pipe) after it"
        )
