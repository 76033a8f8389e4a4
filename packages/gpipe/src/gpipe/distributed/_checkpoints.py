"""Save and load a model trained by several processes, under the names of the full model."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ._agreement import agreement
from ._calls import announce
from ._deferred_signals import allow_signals, defer_signals
from ._groups import Group, expect_group
from ._object_exchange import ObjectExchange, get_exchange
from ._optimizers import by_name, find_options, from_names, options_of_all, parameters_by_name
from ._rank import Rank
from ._stored import Stored, write


@defer_signals()
def save(
    path: str | PathLike[str], rank: nn.Module, optimizer: Optimizer | None = None, *, group: Group | None = None
) -> None:
    """Write a checkpoint of a model in several processes. Any number of processes can load it.

    All processes of ``group`` call this together, with the same path. The format is ``torch.distributed.checkpoint``'s,
    with every tensor once, under its name in the full model: ``model.<name>``, ``optimizer.state.<name>.<key>`` and
    ``optimizer.param_groups.<name>.<option>``. The folder is replaced in one step, after all processes have written. If
    saving fails or is interrupted on any of them, all raise an error, and :func:`load` reads the previous checkpoint.
    Folders and files that this function has not written are never changed.

    Args:
        path: a folder that all processes share. It is created if necessary, and a checkpoint in it is replaced.
        rank: a :class:`gpipe.distributed.Rank`, or a :class:`gpipe.GPipe` or plain module that every process has in
            full.
        optimizer: an optimizer of the parameters of ``rank``. By default only the model is saved.
        group: the processes that save together, including all replicas of a pipe. By default all processes, or only
            this one if there is no process group.

    Raises:
        FileExistsError: ``path`` exists and is not a checkpoint, or it contains other files.
        FileNotFoundError: ``path`` is on the own disk of each machine.
        RuntimeError: the processes of ``rank`` do not all save, for example because the process group was destroyed.
        ValueError: ``optimizer`` has parameters that ``rank`` lacks, or only some processes pass one; the paths differ;
            ``path`` is a URL; an entry of the state dict is a dict, list or tuple; a process calls another method.
        RemoteError: another process has failed.
        LostRankError: another process has exited. :func:`load` reads the last complete checkpoint.
    """
    meeting = _met("save", rank, group)
    first = meeting.groups.me == 0
    with agreement(meeting, "save") as found, allow_signals():
        folder = Folder(path)
        found.must_match = {"path": str(folder.path)}
        found.sent |= _describe_optimizer(rank, optimizer)
        state: dict[str, Any] = {"model": rank.state_dict()}
        for name, value in state["model"].items():
            if isinstance(value, dict | list | tuple):  # torch would write its items under names that no model has
                raise ValueError(
                    f"the entry {name!r} is a {type(value).__name__}; let get_extra_state() return a tensor"
                )
        if optimizer is not None:
            state["optimizer"] = by_name(rank, optimizer)
        if first:
            found.sent["partial"] = folder.begin()
    _expect_optimizers(found.received, meeting.groups.members)
    partial = folder.partial(found.received[0]["partial"])
    write(state, partial, meeting)
    with agreement(meeting, "save, commit"), allow_signals():
        if first:
            folder.commit(partial)


@defer_signals()
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
        RuntimeError: the processes of ``rank`` do not all load.
        ValueError: the checkpoint is of a different model (the error lists the names that differ) or optimizer; only
            some processes pass an optimizer; a process calls another method.
        RemoteError: another process has failed.
    """
    meeting = _met("load", rank, group)
    with agreement(meeting, "load") as found, allow_signals():
        folder = Folder(path)
        found.must_match = {"path": str(folder.path)}
        stored = Stored(folder.whole)
        own = rank.state_dict()
        found.sent = {"names": [*own], **_describe_optimizer(rank, optimizer)}
    _expect_optimizers(found.received, meeting.groups.members)
    with agreement(meeting, "load, read") as read, allow_signals():
        stored.expect_model({name for each in found.received for name in each["names"]}, own)
        state = stored.model(own)
        if optimizer is not None:
            moments = stored.optimizer(parameters_by_name(rank))
            read.sent = {"options": find_options(rank, optimizer, moments)}
    with agreement(meeting, "load, optimizer"), allow_signals():
        if optimizer is not None:
            reports = zip(meeting.groups.members, read.received, strict=True)
            having = {member: each["options"] for member, each in reports if "options" in each}
            moments = from_names(rank, optimizer, moments, options_of_all([*having.values()], [*having]))
    rank.load_state_dict(state)
    if optimizer is not None:
        optimizer.load_state_dict(moments)


def _met(method: str, module: nn.Module, group: Group | None) -> ObjectExchange:
    """Announce a call of ``save`` or ``load`` to all ranks of a pipe, and return the exchange of its processes."""
    for each in module.modules():
        if isinstance(each, Rank):
            announce(each, method, lambda members: _expect_all(method, members, group))
    return get_exchange(group)


def _expect_all(method: str, members: Sequence[int], group: Group | None) -> None:
    """Raise RuntimeError unless all ``members`` of a pipe are in ``group``: each has only a part of the model."""
    is_open = dist.is_available() and dist.is_initialized()
    there = dist.get_process_group_ranks(expect_group(group)) if is_open else []
    missing = [member for member in members if member not in there]
    if len(members) > 1 and missing:
        why = f"group: it lacks rank {missing[0]}; pass one of all" if is_open else "there is no process group"
        raise RuntimeError(
            f"{method}() needs all ranks of the pipe, {[*members]}, because each has a part of the model, but {why}; "
            f"call {method}() before torch.distributed.destroy_process_group()"
        )


def _describe_optimizer(module: nn.Module, optimizer: Optimizer | None) -> dict[str, bool]:
    return {"optimizer": optimizer is not None, "trains": any(p.requires_grad for p in module.parameters())}


def _expect_optimizers(reports: Sequence[Mapping[str, Any]], members: Sequence[int]) -> None:
    """Raise ValueError if only some processes pass an optimizer: the state of the others would be missing."""
    without = [rank for rank, each in zip(members, reports, strict=True) if each["trains"] and not each["optimizer"]]
    having = [rank for rank, each in zip(members, reports, strict=True) if each["optimizer"]]
    if without and having:
        raise ValueError(
            f"optimizer: rank {having[0]} passes one, but rank {without[0]} does not, so its state would be missing; "
            "pass the optimizer of each rank on all ranks, or on none"
        )


_COMMITTED = ".metadata"
"""The last file that torch.distributed.checkpoint writes."""

_WRITTEN = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
"""The names of the files that it writes."""


class Folder:
    """The folder of a checkpoint. Readers find either its old content or its new content, never a mixture.

    New content is written to a new folder next to it. Then the old folder is renamed, the new one gets its name, and
    the old one is deleted. If that is interrupted, :attr:`whole` finds the old one under its new name. All other names
    start with a dot, and a folder is only deleted if it contains nothing but the files of a checkpoint.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise ValueError(f"path: expected a folder that all processes can access, got the URL {str(path)!r}")
        self.path = Path(path).resolve()
        self._previous = self.path.with_name(f".{self.path.name}.gpipe-previous")

    def partial(self, token: str) -> Path:
        """Return the folder that :meth:`begin` has created."""
        return self.path.with_name(f".{self.path.name}.{token}.gpipe-partial")

    @property
    def whole(self) -> Path:
        """The folder with the last complete content. Reading it raises FileNotFoundError if there is none."""
        place = self.path if self.path.exists() else self._previous
        if not (place / _COMMITTED).is_file():
            raise FileNotFoundError(
                f"path: there is no complete checkpoint in {str(self.path)!r}; pass a folder that save() has written"
            )
        return place

    def begin(self) -> str:
        """Create an empty folder, return its token, and delete folders that interrupted calls have left.

        FileExistsError if the folder, or the one that it will be renamed to, has content other than a checkpoint.
        """
        for folder in (self.path, self._previous):
            _expect_checkpoint(folder)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for other in self.path.parent.iterdir():
            is_partial = other.name.startswith(f".{self.path.name}.") and other.name.endswith(".gpipe-partial")
            if is_partial and _foreign(other) is None:
                shutil.rmtree(other, ignore_errors=True)
        token = uuid.uuid4().hex
        self.partial(token).mkdir()
        return token

    def commit(self, partial: Path) -> None:
        """Replace the folder by ``partial``."""
        if self.path.exists():
            for folder in (self.path, self._previous):
                _expect_checkpoint(folder)
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
        partial.rename(self.path)
        shutil.rmtree(self._previous, ignore_errors=True)


def _expect_checkpoint(folder: Path) -> None:
    """Raise FileExistsError if deleting ``folder`` would delete anything but a checkpoint."""
    if not folder.exists():
        return
    is_checkpoint = (folder / _COMMITTED).is_file() or (folder.is_dir() and next(folder.iterdir(), None) is None)
    if not is_checkpoint:
        raise FileExistsError(f"path: {str(folder)!r} exists and is not a checkpoint; pass the name of a new folder")
    other = _foreign(folder)
    if other is not None:
        raise FileExistsError(
            f"path: {str(folder)!r} contains {other!r}, which save() has not written and would delete with the "
            "previous checkpoint; move it elsewhere, or pass the name of a new folder"
        )


def _foreign(folder: Path) -> str | None:
    """Return the name of an entry of ``folder`` that is not a file of a checkpoint."""
    if folder.is_symlink() or not folder.is_dir():
        return folder.name
    return next((each.name for each in folder.iterdir() if not _WRITTEN.fullmatch(each.name) or each.is_dir()), None)
