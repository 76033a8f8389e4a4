"""Checkpoints in files and folders, which are read lazily."""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streams import add_note

from ._sources import Entries, Source

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def source_at(path: str | os.PathLike[str]) -> Source:
    """The checkpoint at ``path``.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a folder without a checkpoint of a known kind.
        ImportError: it takes the package ``safetensors``, which is not there.
    """
    found = Path(path)
    if found.is_dir():
        return _in_folder(found)
    if not found.exists():
        raise FileNotFoundError(
            f"init={os.fspath(path)!r}: there is no such file or folder (init='reset' is for the layers' own "
            "reset_parameters())"
        )
    if found.name.endswith(".index.json"):
        return _indexed(found)
    return Safetensors({found: None}, str(found)) if found.suffix == ".safetensors" else _saved(found)


def _in_folder(folder: Path) -> Source:
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    if (folder / WHOLE).exists():
        return Safetensors({folder / WHOLE: None}, str(folder))
    if (folder / ".metadata").exists():
        return Distributed(folder)
    raise ValueError(
        f"init={str(folder)!r} has no checkpoint: expected {INDEX} or {WHOLE}, as save_pretrained() writes them, or "
        ".metadata, as torch.distributed.checkpoint.save() does; a single file can be given by its own path"
    )


def _indexed(index: Path) -> Source:
    files: dict[Path, list[str]] = defaultdict(list)
    for name, file in json.loads(index.read_text())["weight_map"].items():
        files[index.parent / file].append(name)
    return Safetensors(files, str(index))


def _saved(file: Path) -> Source:
    """A file of ``torch.save``, whose tensors stay in the file until they are read."""
    try:
        entries = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        add_note(error, f"init={str(file)!r}: expected what torch.save(model.state_dict(), file) writes")
        raise
    if not isinstance(entries, Mapping):
        raise TypeError(f"init={str(file)!r}: expected a state dict in it, got {type(entries).__name__}")
    return Entries(entries, str(file))


class Safetensors:
    """Files of the package ``safetensors``.

    Args:
        files: the names to take from each; None for all.
        where: what they are called in errors.
    """

    def __init__(self, files: Mapping[Path, list[str] | None], where: str) -> None:
        self.where = where
        self._open = _opener(where)
        self._shapes: dict[str, torch.Size | None] = {}
        self._files: dict[str, Path] = {}
        for file, names in files.items():
            with self._open(file, "pt") as opened:
                for name in opened.keys() if names is None else names:
                    self._shapes[name] = torch.Size(opened.get_slice(name).get_shape())
                    self._files[name] = file

    def groups(self) -> Mapping[str, Any]:
        return {"": None}

    def shapes(self) -> Mapping[str, torch.Size | None]:
        return self._shapes

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._files[name]].append(name)
        found: dict[str, Any] = {}
        for file, inside in by_file.items():
            with self._open(file, "pt") as opened:
                found.update((name, opened.get_tensor(name)) for name in inside)
        return found


def _opener(where: str) -> Callable[[Path, str], Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"init={where!r} is read by the package 'safetensors', which is not installed; install it, or give a state "
            "dict or a file of torch.save"
        ) from error
    opener: Callable[[Path, str], Any] = safe_open
    return opener


class Distributed:
    """A folder of ``torch.distributed.checkpoint``."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    @cached_property
    def _metadata(self) -> Metadata:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(self._folder).read_metadata()

    def groups(self) -> Mapping[str, Any]:
        """From where entries were in the nested mappings that were saved."""
        paths = (self._metadata.planner_data or {}).values()
        return dict.fromkeys(["", *("".join(f"{key}." for key in path[:-1]) for path in paths)])

    def shapes(self) -> Mapping[str, torch.Size | None]:
        return {name: getattr(entry, "size", None) for name, entry in self._metadata.state_dict_metadata.items()}

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        entries = self._metadata.state_dict_metadata
        state = {name: _room(entries[name]) for name in names}
        with alone_is_meant():
            load(state, storage_reader=FileSystemReader(self._folder), no_dist=True)
        return state


@contextmanager
def alone_is_meant() -> Iterator[None]:
    """A context without torch's warning that only one process reads or writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _room(entry: Any) -> Any:
    """What an entry is loaded into."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
