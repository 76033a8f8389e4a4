"""Save and load a model trained by several processes, under the names of the full model."""

from __future__ import annotations

import os
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ._agreement import agreement
from ._groups import Group
from ._optimizers import by_name, from_names, parameters_by_name
from ._rendezvous import gathering_of
from ._stored import Stored, write


def save(
    path: str | PathLike[str], rank: nn.Module, optimizer: Optimizer | None = None, *, group: Group | None = None
) -> None:
    """Write a checkpoint of a model in several processes. Any number of processes can load it.

    All processes of ``group`` call this together, with the same path. The format is ``torch.distributed.checkpoint``'s,
    with every tensor once, under its name in the full model: ``model.<name>``, ``optimizer.state.<name>.<key>`` and
    ``optimizer.param_groups.<name>.<option>``. The folder is replaced in one step, after all processes have written. If
    saving is interrupted, :func:`load` reads the previous checkpoint.

    Args:
        path: a folder that all processes can write to. It is created if necessary, and a checkpoint in it is replaced.
        rank: a :class:`gpipe.distributed.Rank`, or a :class:`gpipe.GPipe` or plain module that every process has in
            full.
        optimizer: an optimizer of the parameters of ``rank``. By default only the model is saved.
        group: the processes that save together, including all replicas of a pipe. By default all processes, or only
            this one if there is no process group.

    Raises:
        FileExistsError: ``path`` exists and is not a checkpoint.
        ValueError: ``optimizer`` has parameters that ``rank`` lacks; the paths differ; ``path`` is a URL; an entry of
            the state dict is a dict, list or tuple.
        RemoteError: another process has failed.
        LostRankError: another process has exited. :func:`load` reads the last complete checkpoint.
    """
    meeting = gathering_of(group)
    first = meeting.groups.me == 0
    with agreement(meeting) as found:
        folder = Folder(path)
        found.alike = {"path": str(folder.path)}
        state: dict[str, Any] = {"model": rank.state_dict()}
        for name, value in state["model"].items():
            if isinstance(value, dict | list | tuple):  # torch would write its items under names that no model has
                raise ValueError(
                    f"the entry {name!r} is a {type(value).__name__}; let get_extra_state() return a tensor"
                )
        if optimizer is not None:
            state["optimizer"] = by_name(rank, optimizer)
        if first:
            folder.begin()
    write(state, folder.partial, meeting)
    with agreement(meeting):
        if first:
            folder.commit()


def load(
    path: str | PathLike[str], rank: nn.Module, optimizer: Optimizer | None = None, *, group: Group | None = None
) -> None:
    """Load a checkpoint written by :func:`save`, on the same or a different number of processes.

    Each process reads the tensors that it has, so the balance, the placement and the number of processes may have
    changed since the save. All processes of ``group`` call this together. If one fails, all raise an error, and no
    model or optimizer has changed.

    A checkpoint is unpickled, which can run arbitrary code: load only checkpoints that you trust.

    Args:
        path: the folder that :func:`save` wrote.
        rank: the module to load into; see :func:`save`.
        optimizer: an optimizer of the parameters of ``rank``, in the same parameter groups as when it was saved.
        group: the processes that load together; see :func:`save`.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: the checkpoint is of a different model (the error lists the names that differ) or optimizer.
        RemoteError: another process has failed.
    """
    meeting = gathering_of(group)
    with agreement(meeting) as found:
        folder = Folder(path)
        found.alike = {"path": str(folder.path)}
        stored = Stored(folder.whole)
        own = rank.state_dict()
        found.told = {"names": [*own]}
    with agreement(meeting):
        stored.expect_model({name for each in found.heard for name in each["names"]}, own)
        state = stored.model(own)
        moments = None if optimizer is None else from_names(rank, optimizer, stored.optimizer(parameters_by_name(rank)))
    rank.load_state_dict(state)
    if optimizer is not None and moments is not None:
        optimizer.load_state_dict(moments)


_COMMITTED = ".metadata"
"""The last file that torch.distributed.checkpoint writes."""


class Folder:
    """The folder of a checkpoint. Readers find either its old content or its new content, never a mixture.

    New content is written to the folder ``partial`` next to it. Then the old folder is renamed, the new one gets its
    name, and the old one is deleted. If that is interrupted, :attr:`whole` finds the old one under its new name.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise ValueError(f"path: expected a folder that all processes can access, got the URL {str(path)!r}")
        self.path = Path(path).resolve()
        self.partial, self._previous = [self.path.with_name(f"{self.path.name}.{k}") for k in ("partial", "previous")]

    @property
    def whole(self) -> Path:
        """The folder with the last complete content. Reading it raises FileNotFoundError if there is none."""
        place = self.path if self.path.exists() else self._previous
        if not (place / _COMMITTED).is_file():
            raise FileNotFoundError(
                f"path: there is no complete checkpoint in {str(self.path)!r}; pass a folder that save() has written"
            )
        return place

    def begin(self) -> None:
        """Create the empty folder ``partial``, and delete the one that an interrupted save has left.

        FileExistsError if the folder has content other than a checkpoint.
        """
        if self.path.exists() and not (self.path / _COMMITTED).is_file() and not _is_empty(self.path):
            raise FileExistsError(
                f"path: {str(self.path)!r} exists and is not a checkpoint; pass the name of a new folder"
            )
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def commit(self) -> None:
        """Replace the folder by ``partial``."""
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
        self.partial.rename(self.path)
        shutil.rmtree(self._previous, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None
