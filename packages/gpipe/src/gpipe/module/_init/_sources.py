"""Open checkpoint files and folders as state dicts that load their values lazily."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_IN_FOLDERS = ("model.safetensors.index.json", "model.safetensors")


def state_dict_at(path: str | os.PathLike[str]) -> Any:
    """Return the state dict at ``path``, or any other object that ``torch.save`` has written there."""
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in _IN_FOLDERS if (file / name).exists()), file)
    if not file.exists():
        raise FileNotFoundError(
            f"init={os.fspath(path)!r}: there is no such file or folder; use init='reset' for the layers' own "
            "reset_parameters(), or init=huggingface_hub.snapshot_download(...) for a model from the Hugging Face hub"
        )
    if file.is_dir():
        raise ValueError(
            f"init={str(path)!r} has no checkpoint: expected {' or '.join(_IN_FOLDERS)}, as written by "
            "save_pretrained(); pass the path of a single file, or load a checkpoint of torch.distributed.checkpoint "
            "into the pipe: GPipe(..., init='reset'), then gpipe.distributed.load(path, pipe)"
        )
    if file.name.endswith(".index.json"):
        shards = json.loads(file.read_text())["weight_map"].values()
        return Safetensors([file.parent / shard for shard in dict.fromkeys(shards)])
    if file.suffix == ".safetensors":
        return Safetensors([file])
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


class Safetensors(Mapping[str, Tensor]):
    """The tensors in ``.safetensors`` files, read lazily."""

    def __init__(self, files: Iterable[Path]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                f"init={[*map(str, files)]} requires the package 'safetensors', which is not installed; install it, or "
                "pass a state dict or a file written by torch.save"
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
