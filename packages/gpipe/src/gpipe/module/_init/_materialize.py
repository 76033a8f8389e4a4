"""Allocate and initialise a model without data, on the devices of its partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from streams import add_note

from .._devices import give_data, leaf_of, move, swap_data
from ._initializer import Initializer, Loaded
from ._model import Layers, Owned, modules_of

_UNWRITTEN = 255
"""Each byte of memory that no value was written to: not-a-number, or -1."""


def expect_materializable(layers: Layers, places: Sequence[torch.device], initializer: Initializer) -> None:
    """Raise unless the layers of a model on ``meta`` can be given data. Nothing is changed.

    Args:
        layers: the layers of the model, by name.
        places: the device of each partition.
        initializer: gives values to a layer.

    Raises:
        ValueError: a place is ``meta`` too, a tensor is lazy or of a subclass, none is on ``meta``, or a state dict has
            other names than the model.
    """
    if any(place.type == "meta" for place in places):
        raise ValueError(
            "devices: nothing on 'meta' can hold the data that init= is for; leave init= out, or give others"
        )
    named = [(owned.named(name), tensor) for owned in modules_of(layers) for name, tensor in owned.tensors()]
    for name, tensor in named:
        if is_lazy(tensor) or (tensor.is_meta and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__):
            raise ValueError(
                f"init: {name!r} is a {type(tensor).__name__}; expected a plain tensor; if it is lazy, call its module "
                "once with a sample"
            )
    if named and not any(tensor.is_meta for _, tensor in named):
        raise ValueError(
            "init= gives data to a model that was built on the device 'meta', but this one has data already; leave "
            "init= out, or call model.load_state_dict() first"
        )
    if isinstance(initializer, Loaded):
        initializer.expect_names(layers)


def materialize(
    layers: Layers, partitions: Iterable[nn.Module], places: Sequence[torch.device], initializer: Initializer
) -> None:
    """Give every partition memory on its place and values, layer by layer: no more than one is in host memory.

    Args:
        layers: the layers of the model, by name, of which other partitions may have some.
        partitions: the partitions of the model, in order. What has data already is moved.
        places: the device of each partition.
        initializer: gives values to a layer.

    Raises:
        ValueError: ``initializer`` left tensors without values.
        Exception: any error of ``initializer``, with a note that names the layer.
    """
    blocks = [dict(partition.named_children()) for partition in partitions]
    memory = Memory()
    with torch.no_grad():
        for block, place in zip(blocks, places, strict=True):
            device = torch.device("cpu") if place.type == "cpu" else place
            for name in block:
                _materialize_layer(layers, name, device, memory, initializer)
        _expect_values(modules_of(layers), memory)


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
        move(layer, device)  # what was made anew, elsewhere
    except Exception as error:
        add_note(error, f"this happened as init= gave values to layer {name!r} on {str(device)!r}")
        raise


class Memory:
    """The memory of tensors that were on ``meta``. Tensors that share a storage on ``meta`` share one here too."""

    def __init__(self) -> None:
        self.fresh: dict[int, Tensor] = {}
        # With the storages on meta, or their addresses would be given out again.
        self._rooms: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def give(self, tensor: Tensor, device: torch.device) -> None:
        """Give ``tensor``, which remains the same object, memory on ``device`` of its size, strides and dtype."""
        meta = tensor.untyped_storage()
        if meta._cdata not in self._rooms:
            room = torch.full((meta.nbytes(),), _UNWRITTEN, dtype=torch.uint8, device=device)
            self._rooms[meta._cdata] = meta, room
        room = self._rooms[meta._cdata][1].view(tensor.dtype)
        view = torch.as_strided(room, tensor.size(), tensor.stride(), tensor.storage_offset())
        swap_data(tensor, leaf_of(view, tensor.requires_grad))
        self.fresh[id(tensor)] = tensor


def _expect_values(modules: Iterable[Owned], memory: Memory) -> None:
    left = {
        owned.named(name): None
        for owned in modules
        for name, tensor in owned.tensors()
        if id(tensor) in memory.fresh and _is_unwritten(tensor)
    }
    if left:
        raise ValueError(
            f"init= has not written to {', '.join(map(repr, left))}; initialise them too, by reset_parameters() of "
            "their module or a function, or build them with data, outside of torch.device('meta')"
        )


def _is_unwritten(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    # The first element tells of most tensors, and needs no memory.
    return flat.numel() > 0 and all(bool((part.view(torch.uint8) == _UNWRITTEN).all()) for part in (flat[:1], flat))
