"""Checkpoints of what several processes train, under the names of the model, for any number of processes."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ._folders import Folder
from ._gathering import gathering_of
from ._optimizers import by_name, from_names
from ._stored import Stored, write


def save(
    path: str | PathLike[str],
    rank: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint of what all processes train, which any number of them can load.

    All of ``group`` call this with the same path. It is one of ``torch.distributed.checkpoint``, with everything under
    the names that it has in the model: ``model.<name>``, ``optimizer.state.<name>.<key>`` and
    ``optimizer.param_groups.<name>.<option>``. What several processes have is written once.

    The folder is replaced as a whole, after all have written. If that is interrupted, :func:`load` finds what was saved
    before.

    Args:
        path: of a folder that all processes reach. It is made; a checkpoint that is there is replaced.
        rank: a :class:`gpipe.distributed.Rank`; or a :class:`gpipe.GPipe` or plain module, whole in every process.
        optimizer: of its parameters.
        group: who saves; by default all processes, or this one alone if there is no process group. Replicas of a pipe
            save together.

    Raises:
        FileExistsError: ``path`` holds other things than a checkpoint.
        ValueError: ``optimizer`` has other parameters; processes were given different paths; ``path`` is an address.
        RemoteError: another process has failed.
        LostRankError: another process has ended. :func:`load` finds the last checkpoint that is whole.
    """
    together = gathering_of(group)
    with together.agreement() as found:
        folder = Folder(path)
        found.alike = {"path": str(folder.path)}
        state: dict[str, Any] = {"model": rank.state_dict()}
        if optimizer is not None:
            state["optimizer"] = by_name(rank, optimizer)
        if together.first:
            folder.begin()
    write(state, folder.partial, together)
    with together.agreement():
        if together.first:
            folder.commit()


def load(
    path: str | PathLike[str],
    rank: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint that :func:`save` has written, on the same or another number of processes.

    Each process reads what it has of the model. So balance, placement and number of processes may be others than when
    it was saved, and the model may be in one process, in a pipe or not. All of ``group`` call this; if one of them
    fails, all raise, and nothing has changed on any.

    A checkpoint is unpickled: load only those that you trust.

    Args:
        path: of the folder.
        rank: what to load into; see :func:`save`.
        optimizer: of its parameters, in the groups that they were in.
        group: who loads; see :func:`save`.

    Raises:
        FileNotFoundError: there is no whole checkpoint.
        ValueError: it is one of another model, which the error compares by keys; or of another optimizer.
        RemoteError: another process has failed.
    """
    together = gathering_of(group)
    with together.agreement() as found:
        folder = Folder(path)
        found.alike = {"path": str(folder.path)}
        stored = Stored(folder.whole)
        own = rank.state_dict()
        found.told = {"names": [*own]}
    with together.agreement():
        stored.expect_model({name for each in found.heard for name in each["names"]}, own)
        state = stored.model(own)
        moments = None if optimizer is None else from_names(rank, optimizer, stored.optimizer(_named(rank)))
    rank.load_state_dict(state)
    if optimizer is not None and moments is not None:
        optimizer.load_state_dict(moments)


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by all names that they have."""
    return dict(module.named_parameters(remove_duplicate=False))
