"""Save and load a model that several processes train, under the names of the whole model."""

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

    All processes of ``group`` call this together, with the same path. The format is that of
    ``torch.distributed.checkpoint``, with every tensor once, under its name in the whole model: ``model.<name>``,
    ``optimizer.state.<name>.<key>`` and ``optimizer.param_groups.<name>.<option>``. The folder is replaced as a whole,
    after all processes have written; if that is interrupted, :func:`load` reads the checkpoint before.

    Args:
        path: a folder that all processes can write to. It is created; a checkpoint in it is replaced.
        rank: a :class:`gpipe.distributed.Rank`; or a :class:`gpipe.GPipe` or plain module that every process has whole.
        optimizer: an optimizer of the parameters of ``rank``; without one only the model is saved.
        group: the processes that save together, including all replicas of a pipe; all by default, or this one alone if
            there is no process group.

    Raises:
        FileExistsError: ``path`` holds something other than a checkpoint.
        ValueError: ``optimizer`` has parameters that ``rank`` lacks; the paths differ; ``path`` is a URL; an entry of
            the state dict is a dict or a list.
        RemoteError: another process has failed.
        LostRankError: another process has ended. :func:`load` reads the last complete checkpoint.
    """
    meeting = gathering_of(group)
    first = meeting.groups.me == 0
    with agreement(meeting) as found:
        folder = Folder(path)
        found.alike = {"path": str(folder.path)}
        state: dict[str, Any] = {"model": rank.state_dict()}
        for name, value in state["model"].items():
            if isinstance(value, dict | list | tuple):  # written entry by entry, by names that no model has
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
    """Load a checkpoint that :func:`save` has written, on the same or another number of processes.

    Each process reads the tensors that it has, so balance, placement and number of processes may differ from those at
    the save. All processes of ``group`` call this together; if one fails, all raise, and no model or optimizer has
    changed.

    A checkpoint is unpickled, which can run any code: load only those that you trust.

    Args:
        path: the folder that :func:`save` wrote.
        rank: the module to load into; see :func:`save`.
        optimizer: an optimizer of the parameters of ``rank``, in the same parameter groups as when it was saved.
        group: the processes that load together; see :func:`save`.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: it is a checkpoint of another model (the error lists the names that differ) or of another optimizer.
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
"""The file that torch.distributed.checkpoint writes last."""


class Folder:
    """The folder of a checkpoint, whose content is replaced as a whole: a reader finds the old or the new, never both.

    The new content is written to the folder ``partial`` beside it. Then the old folder is renamed, the new one gets its
    name, and the old one is deleted. If that is interrupted, :attr:`whole` finds the old one under its other name.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise ValueError(f"path: expected a folder that all processes reach, got the address {str(path)!r}")
        self.path = Path(path).resolve()
        self.partial, self._previous = [self.path.with_name(f"{self.path.name}.{k}") for k in ("partial", "previous")]

    @property
    def whole(self) -> Path:
        """The folder that has the last complete content; FileNotFoundError if there is none."""
        place = self.path if self.path.exists() else self._previous
        if not (place / _COMMITTED).is_file():
            raise FileNotFoundError(f"path: there is no whole checkpoint in {str(self.path)!r}; save() finished none")
        return place

    def begin(self) -> None:
        """Make an empty folder for new content; delete what an interrupted save has left, and nothing else."""
        if self.path.exists() and not (self.path / _COMMITTED).is_file() and not _is_empty(self.path):
            raise FileExistsError(
                f"path: {str(self.path)!r} exists and is not a checkpoint; give the name of a new folder"
            )
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def commit(self) -> None:
        """Replace the content of the folder by that of ``partial``."""
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
        self.partial.rename(self.path)
        shutil.rmtree(self._previous, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None
