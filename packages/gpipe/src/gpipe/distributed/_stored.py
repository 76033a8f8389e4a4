"""A checkpoint of ``torch.distributed.checkpoint``, as it is written and read for :mod:`gpipe.distributed`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._errors import RemoteError
from ._gathering import Gathering

if TYPE_CHECKING:  # for users of checkpoints alone: these take as long to import as torch
    from torch.distributed.checkpoint.metadata import Metadata

_SHOWN = 5


def write(state: dict[str, Any], folder: Path, together: Gathering) -> None:
    """Write what all have, each a part.

    Raises:
        RemoteError: another process has failed; what this one raises goes through.
        LostRankError: another process has ended.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _own_error(together), _alone_is_meant(), together.collectives():
        save(
            state,
            storage_writer=FileSystemWriter(folder),
            process_group=together.group,
            no_dist=together.group is None,
        )


class Stored:
    """What a folder holds.

    Raises:
        OSError, ValueError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._folder = folder
        metadata: Metadata = FileSystemReader(folder).read_metadata()
        self._entries = metadata.state_dict_metadata
        self._paths = metadata.planner_data or {}

    def expect_model(self, names: Collection[str], own: Mapping[str, Any]) -> None:
        """Raise ValueError if it is not of a model whose state has these names, of which this process has ``own``."""
        found = {key.removeprefix("model.") for key in self._entries if key.startswith("model.")}
        complaints = [
            *_listed("it has no", [name for name in names if name not in found]),
            *_listed("the model has no", [name for name in found if name not in names]),
            *_listed("of another shape there:", [*self._other_shapes(own)]),
        ]
        if complaints:
            raise ValueError(f"the checkpoint in {str(self._folder)!r} is of another model: {'; '.join(complaints)}")

    def _other_shapes(self, own: Mapping[str, Any]) -> Iterator[str]:
        for name, value in own.items():
            stored = getattr(self._entries.get(f"model.{name}"), "size", None)
            shape = value.shape if isinstance(value, Tensor) else None
            if f"model.{name}" in self._entries and stored != shape:
                yield f"{name} ({_shape(stored)}, here {_shape(shape)})"

    def model(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a state like ``own``, in memory of their own."""
        targets = {f"model.{name}": _like(value) for name, value in own.items()}
        return {key.removeprefix("model."): value for key, value in self._read(targets).items()}

    def optimizer(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state of an optimizer by name, of parameters with these names; nothing of those that have none here.

        Raises:
            ValueError: it was saved without one.
        """
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        if not any(key.startswith("optimizer.") for key in self._entries):
            raise ValueError(f"optimizer: the checkpoint in {str(self._folder)!r} was saved without one")
        places = {key: place for key in self._entries for place in self._places(key, parameters)}
        targets = {
            key: _memory(self._entries[key], parameters[place[1]]) if place[0] == "state" else None
            for key, place in places.items()
        }
        empty: dict[str, Any] = {"state": {}, "param_groups": {}}
        return empty | unflatten_state_dict(self._read(targets), places)

    def _places(self, key: str, parameters: Mapping[str, Tensor]) -> Iterator[tuple[Any, ...]]:
        """Where in the state of an optimizer the value of ``key`` belongs, if it is of one of ``parameters``."""
        head, kind, *parts = *key.split("."), ""
        if head != "optimizer":
            return
        if kind == "class":
            yield (kind,)
        for k in range(1, len(parts) - 1):
            name = ".".join(parts[:k])
            if name in parameters:
                path = self._paths.get(key, ())
                # Longer, if a value of the state is a dict or list itself.
                yield (kind, name, *(path[3:] or [".".join(parts[k:-1])]))

    def _read(self, targets: dict[str, Any]) -> dict[str, Any]:
        """``targets``, with the values that are stored; tensors are read in place."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _alone_is_meant(), _own_error(None):
            load(targets, storage_reader=FileSystemReader(self._folder), planner=planner, no_dist=True)
        return targets


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    """A process that reads or writes alone means to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextmanager
def _own_error(together: Gathering | None) -> Iterator[None]:
    """Turns torch's summary of what has failed into what has failed here."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = {k: failed for k, (failed, _) in error.failures.items()}
    else:
        return
    me = 0 if together is None or together.group is None else together.group.rank()
    if me in failures:
        raise failures[me]
    k, failed = min(failures.items(), key=lambda each: each[0])
    assert together is not None
    raise RemoteError(f"rank {together.members[k]} failed: {type(failed).__name__}: {failed}")


def _like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Memory for a value like this one: of the host, unless it is a part of a tensor over several processes."""
    if not isinstance(value, Tensor):
        return None
    value = value.detach()
    return torch.empty_like(value, dtype=dtype, device=None if _is_sharded(value) else "cpu")


def _memory(entry: Any, parameter: Tensor) -> Any:
    """Memory for a value of the state of ``parameter``: in parts like it, if they are of one shape."""
    if not hasattr(entry, "size"):
        return None
    if entry.size == parameter.shape:
        return _like(parameter, entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _shape(size: Collection[int] | None) -> str:
    return "no tensor" if size is None else "×".join(map(str, size)) or "a scalar"


def _listed(word: str, items: Collection[str]) -> list[str]:
    """A complaint of ``items``, if there are any; of many only the first."""
    if not items:
        return []
    shown = sorted(items)
    rest = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return [f"{word} {', '.join(shown[:_SHOWN])}{rest}"]
