"""Read and write checkpoints in the format of ``torch.distributed.checkpoint``.

Its planners, writers and readers are imported late, because the import takes as long as torch's. Processes exchange
plans and results with :func:`agreement`, so that an error on one is raised on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._agreement import agreement
from ._deferred_signals import allow_signals
from ._object_exchange import ObjectExchange

_NOT_SHARED = (
    "path: not all processes see the same files in {0}; save to a folder on a file system that all machines share, not "
    "on each machine's own disk"
)

_SHOWN = 5  # names in an error


def write(state: dict[str, Any], folder: Path, meeting: ObjectExchange) -> None:
    """Write the states of all processes together, into a ``folder`` that the first process has created.

    The first process assigns entries that several processes have. FileNotFoundError if a process does not see the
    folder, or the first process does not see the files of another one.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    planner, writer, me = DefaultSavePlanner(), FileSystemWriter(folder), meeting.groups.me
    with agreement(meeting, "save, plan") as planned, allow_signals():
        if not folder.is_dir():  # its name is new, so that no earlier answer of a network file system is cached
            raise FileNotFoundError(_NOT_SHARED.format(folder.parent))
        planner.set_up_planner(state, writer.storage_meta(), me == 0)
        writer.set_up_storage_writer(me == 0)
        planned.sent = {"plan": writer.prepare_local_plan(planner.create_local_plan())}
    with agreement(meeting, "save, division") as divided, allow_signals():
        if me == 0:
            plans, metadata = planner.create_global_plan([each["plan"] for each in planned.received])
            divided.sent = {"plans": writer.prepare_global_plan(plans)}
    with agreement(meeting, "save, writing") as written, allow_signals():
        own = planner.finish_plan(divided.received[0]["plans"][me])
        written.sent = {"results": writer.write_data(own, planner).wait()}
    with agreement(meeting, "save, end"), allow_signals():
        if me == 0:
            for results in (each["results"] for each in written.received):
                if any(not (folder / each.storage_data.relative_path).is_file() for each in results):
                    raise FileNotFoundError(_NOT_SHARED.format(folder.parent))
            writer.finish(metadata, [each["results"] for each in written.received])


class Stored:
    """The content of a checkpoint folder. Raises OSError or ValueError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._folder, self._reader = folder, FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._entries = self._metadata.state_dict_metadata

    def expect_model(self, names: set[str], own: Mapping[str, Any]) -> None:
        """Raise ValueError unless the checkpoint has exactly these ``names``, and the shapes of ``own``."""
        sizes = {
            key.removeprefix("model."): getattr(entry, "size", None)
            for key, entry in self._entries.items()
            if key.startswith("model.")
        }
        shapes = {name: getattr(value, "shape", None) for name, value in own.items()}
        complaints = {
            "it has no": names - sizes.keys(),
            "the model has no": sizes.keys() - names,
            "it has different shapes for": {name for name in shapes if shapes[name] != sizes.get(name, shapes[name])},
        }
        differences = [f"{what} {', '.join(sorted(found)[:_SHOWN])}" for what, found in complaints.items() if found]
        if differences:
            raise ValueError(
                f"the checkpoint in {str(self._folder)!r} is of a different model: {'; '.join(differences)}"
            )

    def model(self, own: Mapping[str, Any]) -> dict[str, Any]:
        targets = {f"model.{name}": _like(value) for name, value in own.items()}
        return {key.removeprefix("model."): value for key, value in self._read(targets).items()}

    def optimizer(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Read the optimizer state of these parameters, by name; ValueError if the checkpoint has no optimizer."""
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        if not any(key.startswith("optimizer.") for key in self._entries):
            raise ValueError(f"optimizer: the checkpoint in {str(self._folder)!r} was saved without one")
        paths = [(key, _in_full(path)) for key, path in (self._metadata.planner_data or {}).items()]
        places = {
            key: path[1:] for key, path in paths if path[0] == "optimizer" and (len(path) == 2 or path[2] in parameters)
        }
        targets = {
            key: _memory(self._entries[key], parameters[place[1]] if place[0] == "state" else None)
            for key, place in places.items()
        }
        empty: dict[str, Any] = {"state": {}, "param_groups": {}}
        return empty | unflatten_state_dict(self._read(targets), places)

    def _read(self, targets: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(self._reader.prepare_local_plan(planner.create_local_plan()))
        self._reader.read_data(plan, planner).wait()
        return targets


def _in_full(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the full path of an entry, even if torch has flattened it to ``("optimizer", "state.<name>.<key>")``."""
    if path[0] != "optimizer" or len(path) > 2 or "." not in path[1]:
        return path
    name, _, key = path[1].rpartition(".")
    return (path[0], *name.split(".", 1), key)


def _like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Allocate a tensor like ``value`` on the CPU, or on the same device if it is a DTensor; None for other values."""
    if not isinstance(value, Tensor):
        return None
    value = value.detach()
    return torch.empty_like(value, dtype=dtype, device=None if hasattr(value, "placements") else "cpu")


def _memory(entry: Any, parameter: Tensor | None) -> Any:
    if not hasattr(entry, "size"):
        return None
    if parameter is not None and entry.size == parameter.shape:
        return _like(parameter, entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)
