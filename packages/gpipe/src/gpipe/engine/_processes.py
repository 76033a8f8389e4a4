"""Interface to other processes: stages on other ranks, and data-parallel replicas.

One process has all stages, unless :mod:`gpipe.distributed` adds others.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint._random import RunRNG
from ..transport._transport import Channel
from ._failures import Failures
from ._losses import Losses
from ._settings import RunObserver


class RunState(NamedTuple):
    """The part of a run that other processes can read.

    Attributes:
        trains: whether there are backwards.
        failures: the failures of this process, and the earliest one reported by other processes.
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
    """The interaction of a pipe with other processes. This base class, for a single process, does nothing.

    Attributes:
        ranks: the process of each stage; None if this one has all.
        me: the index of this process among them; None if there are no others.
    """

    ranks: tuple[int, ...] | None = None
    me: int | None = None

    def channel(self, number: int, run: RunState) -> Channel | None:
        """Return channel ``number`` of a run if its other end is in a different process, else None."""
        return None

    def together(self, run: RunState) -> AbstractContextManager[None]:
        """Return the context of a full run; all processes synchronize at its end."""
        return nullcontext()

    def interruptible(self) -> AbstractContextManager[Any]:
        """Return the context of the part of a run that an interrupt may end, because the other processes get it."""
        return nullcontext()

    def find_shared(self, module: nn.Module) -> list[Tensor]:
        """Return the leaves in ``module`` that other processes also use. Their gradients are summed over processes."""
        return []

    def sum_gradients(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return the ``gradients`` of this process, summed over processes for leaves that others also use."""
        return gradients


ALONE: Final = Processes()
"""A process without others."""


def may_be_data_parallel() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_data_parallel(parameters: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a ``DistributedDataParallel`` that averages gradients has any of ``parameters``.

    Its hooks do nothing unless its own forward has run before. So the gradients would silently not be averaged.
    """
    if not parameters or not may_be_data_parallel():
        return
    wanted = {id(parameter) for parameter in parameters}
    # The wrapper is outside the pipe, which has no reference to it, and torch has no list of wrappers. Searching all
    # objects is slow, but only needed if other code holds the node of a parameter.
    kind = torch.nn.parallel.DistributedDataParallel
    # By type(), because isinstance() reads __class__ of objects, which runs the code of proxies.
    every = gc.get_objects()
    kinds = {each for each in set(map(type, every)) if issubclass(each, kind)}
    around = [each for each in every if type(each) in kinds and each.require_backward_grad_sync] if kinds else []
    if any(not wanted.isdisjoint(map(id, each.parameters())) for each in around):
        raise RuntimeError(
            "step() does not go through the forward of the DistributedDataParallel around this pipe, which would not "
            "average its gradients; call ddp(input) and backward(), or use step() under ddp.no_sync() or without "
            "DistributedDataParallel, and call gpipe.distributed.average_gradients(pipe) after it"
        )
