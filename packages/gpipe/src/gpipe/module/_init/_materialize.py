"""Allocate and initialize a ``meta`` model on the devices of its partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from streams import add_note

from .._devices import create_leaf, give_data, move, swap_data
from ._initializer import Initializer, Loaded
from ._model import Layers, Owned, iterate_modules

_UNWRITTEN = 255
"""The value of each byte that has not been written: NaN in floating-point dtypes, -1 in signed integers."""


def expect_materializable(layers: Layers, places: Sequence[torch.device], initializer: Initializer) -> None:
    """Check that the layers of a model on ``meta`` can be materialized, without changing anything.

    Args:
        layers: maps names to layers.
        places: the device of each partition.
        initializer: the function that initializes a layer.

    Raises:
        ValueError: a device is ``meta``, a tensor is lazy or of a subclass, no tensor is on ``meta``, or the names in a
            state dict differ from the model's.
    """
    if any(place.type == "meta" for place in places):
        raise ValueError("devices: 'meta' cannot hold the data that init= loads; omit init=, or pass other devices")
    named = [(owned.get_path(name), tensor) for owned in iterate_modules(layers) for name, tensor in owned.tensors()]
    for name, tensor in named:
        if is_lazy(tensor) or (tensor.is_meta and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__):
            raise ValueError(
                f"init: expected {name!r} to be a plain tensor; got a {type(tensor).__name__}. If it is lazy, call its "
                "module once with a sample"
            )
    if named and not any(tensor.is_meta for _, tensor in named):
        raise ValueError(
            "init= is for a model built on 'meta', but this one is already initialized; omit init=, or call "
            "model.load_state_dict() first"
        )
    if isinstance(initializer, Loaded):
        initializer.expect_names(layers)


def materialize(
    layers: Layers, partitions: Iterable[nn.Module], places: Sequence[torch.device], initializer: Initializer
) -> None:
    """Allocate and initialize the partitions on their devices, with at most one layer in host memory at a time.

    Args:
        layers: maps names to layers, including layers of partitions that are not in ``partitions``.
        partitions: the partitions of the model, in order. Tensors that are not on ``meta`` are moved.
        places: the device of each partition.
        initializer: the function that initializes a layer.

    Raises:
        ValueError: ``initializer`` left tensors uninitialized.
        Exception: any error of ``initializer``, with a note that contains the layer's name.
    """
    blocks = [dict(partition.named_children()) for partition in partitions]
    memory = Memory()
    with torch.no_grad():
        for block, place in zip(blocks, places, strict=True):
            device = torch.device("cpu") if place.type == "cpu" else place
            for name in block:
                _materialize_layer(layers, name, device, memory, initializer)
        _expect_values(iterate_modules(layers), memory)


def _materialize_layer(
    layers: Layers, name: str, device: torch.device, memory: Memory, initializer: Initializer
) -> None:
    layer = layers[name]
    try:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_meta:
                memory.give(tensor, device)
            elif tensor.device != device:
                give_data(tensor, tensor.to(device))  # not by a move of the layer, which quantizes some fresh tensors
        with device:
            initializer(layers, name, memory.fresh)
        move(layer, device)  # tensors that the initializer replaced
    except Exception as error:
        add_note(error, f"this happened while init= initialized layer {name!r} on {str(device)!r}")
        raise


class Memory:
    """The memory of tensors that were on ``meta``. Tensors that shared a storage on ``meta`` still share one."""

    def __init__(self) -> None:
        self.fresh: dict[int, Tensor] = {}
        # Keeps the storages on meta alive, so that their addresses are not reused.
        self._rooms: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def give(self, tensor: Tensor, device: torch.device) -> None:
        """Allocate ``tensor`` on ``device`` with its shape, strides and dtype. It remains the same object."""
        meta = tensor.untyped_storage()
        if meta._cdata not in self._rooms:
            room = torch.full((meta.nbytes(),), _UNWRITTEN, dtype=torch.uint8, device=device)
            self._rooms[meta._cdata] = meta, room
        room = self._rooms[meta._cdata][1].view(tensor.dtype)
        view = torch.as_strided(room, tensor.size(), tensor.stride(), tensor.storage_offset())
        swap_data(tensor, create_leaf(view, tensor.requires_grad))
        self.fresh[id(tensor)] = tensor


def _expect_values(modules: Iterable[Owned], memory: Memory) -> None:
    left = {
        owned.get_path(name): None
        for owned in modules
        for name, tensor in owned.tensors()
        if id(tensor) in memory.fresh and _is_unwritten(tensor)
    }
    if left:
        raise ValueError(
            f"init= left {', '.join(map(repr, left))} uninitialized; set them in reset_parameters() of their module "
            "or in the init function, or create them outside torch.device('meta')"
        )


def _is_unwritten(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    # The first element suffices for most tensors, and needs no temporary.
    return flat.numel() > 0 and all(bool((part.view(torch.uint8) == _UNWRITTEN).all()) for part in (flat[:1], flat))
