"""Checkpoints in files and folders, as state dicts whose values are read when they are asked for."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_IN_FOLDERS = ("model.safetensors.index.json", "model.safetensors", ".metadata")


def state_dict_at(path: str | os.PathLike[str]) -> Any:
    """The state dict at ``path``, or whatever else ``torch.save`` has written there.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a folder without a checkpoint of a known kind.
        ImportError: it takes the package ``safetensors``, which is not there.
    """
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in _IN_FOLDERS if (file / name).exists()), file)
    if not file.exists():
        raise FileNotFoundError(
            f"init={os.fspath(path)!r}: there is no such file or folder (init='reset' is for the layers' own "
            "reset_parameters())"
        )
    if file.is_dir():
        raise ValueError(
            f"init={str(path)!r} has no checkpoint: expected one of {', '.join(_IN_FOLDERS)}, as save_pretrained() and "
            "torch.distributed.checkpoint.save() write them; a single file can be given by its own path"
        )
    if file.name == ".metadata":
        return CheckpointFolder(file.parent)
    if file.name.endswith(".index.json"):
        shards = json.loads(file.read_text())["weight_map"].values()
        return Safetensors([file.parent / shard for shard in dict.fromkeys(shards)])
    if file.suffix == ".safetensors":
        return Safetensors([file])
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


class Safetensors(Mapping[str, Tensor]):
    """The tensors in files of the package ``safetensors``."""

    def __init__(self, files: Iterable[Path]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                f"init={[*map(str, files)]} is read by the package 'safetensors', which is not installed; install it, "
                "or give a state dict or a file of torch.save"
            ) from error
        opened: list[Any] = [safe_open(file, "pt") for file in files]
        self._files: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class CheckpointFolder(Mapping[str, Any]):
    """The entries of a folder of ``torch.distributed.checkpoint``, however many processes wrote it."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._reader = FileSystemReader(folder)
        self._entries: dict[str, Any] = self._reader.read_metadata().state_dict_metadata

    def __getitem__(self, name: str) -> Any:
        from torch.distributed.checkpoint.state_dict_loader import load

        entry = self._entries[name]
        room = torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        state = {name: room}
        with alone_is_meant():
            load(state, storage_reader=self._reader, no_dist=True)
        return state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@contextmanager
def alone_is_meant() -> Iterator[None]:
    """A context without torch's warning that only one process reads or writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
