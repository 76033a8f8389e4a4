"""Allocate and initialise a model without data, on the devices of its partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from streams import add_note

from .._devices import move
from ._means import Means
from ._memory import Memory
from ._model import Layers, Owned, modules_of, modules_of_layer
from ._written import Written


def expect_materializable(layers: Layers, places: Sequence[torch.device], means: Means) -> None:
    """Raise, before anything changes, unless ``means`` can give data to ``layers`` on ``places``.

    Args:
        layers: of the model, by their names.
        places: the devices of the partitions.
        means: how layers get their values.

    Raises:
        ValueError: a place is ``meta``, or no tensor of the layers is there, or one that cannot be made elsewhere; or
            ``means`` has not what the layers need.
    """
    if any(place.type == "meta" for place in places):
        raise ValueError(
            "devices: nothing on 'meta' can hold the data that init= is for; leave init= out, or give others"
        )
    for owned in modules_of(layers):
        for name, tensor in owned.tensors():
            _expect_ordinary(owned.named(name), tensor)
    tensors = [tensor for owned in modules_of(layers) for _, tensor in owned.tensors()]
    if tensors and not any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            "init= gives data to a model that was built on the device 'meta', but this one has data already; leave "
            "init= out, or call model.load_state_dict() first"
        )
    means.expect(layers)


def _expect_ordinary(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name!r} is lazy and has no size yet; run the module once on a sample, then try again")
    kind = type(tensor)
    if tensor.is_meta and (tensor.layout != torch.strided or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__):
        raise ValueError(f"{name!r} on 'meta' is a {kind.__name__} of layout {tensor.layout}; expected a plain tensor")


def materialize(partitions: Iterable[nn.Module], places: Sequence[torch.device], means: Means) -> None:
    """Give every partition memory on its place and values, layer by layer: no more than one is in host memory.

    If that fails, tensors that had values before have them again.

    Args:
        partitions: of the model; their layers are changed in place.
        places: the device of each partition.
        means: how layers get their values.

    Raises:
        ValueError: ``means`` left tensors without values.
        Exception: what ``means`` raises, with a note that names the layer.
    """
    blocks = [dict(partition.named_children()) for partition in partitions]
    layers: Layers = {name: layer for block in blocks for name, layer in block.items()}
    memory = Memory()
    with torch.no_grad(), _restored_on_failure(layers), Written(memory.unwritten):
        for block, place in zip(blocks, places, strict=True):
            device = torch.device("cpu") if place.type == "cpu" else place
            for name in block:
                _materialize_layer(layers, name, device, memory, means)
        _expect_values(modules_of(layers), memory)


@contextmanager
def _restored_on_failure(layers: Layers) -> Iterator[None]:
    """If the block raises, tensors that had values before have them again."""
    tensors = [t for layer in layers.values() for t in (*layer.parameters(), *layer.buffers()) if not t.is_meta]
    values = [tensor.clone() for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        raise


def _materialize_layer(layers: Layers, name: str, device: torch.device, memory: Memory, means: Means) -> None:
    layer = layers[name]
    try:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_meta:
                memory.give(tensor, device)
        _move(layer, device, memory)  # what had data before
        with device:
            means.fill(layers, name, memory.fresh)
        _expect_no_meta(modules_of_layer(layers, name))
        _move(layer, device, memory)  # what was made anew, elsewhere
    except Exception as error:
        add_note(error, f"this happened as init= gave values to layer {name!r} on {str(device)!r}")
        raise


def _move(layer: nn.Module, device: torch.device, memory: Memory) -> None:
    # What an earlier partition shares may come along, and may have no values yet.
    unwritten = [tensor for tensor in layer.parameters() if memory.is_unwritten(tensor)]
    move(layer, device)
    memory.unwritten |= {tensor.untyped_storage()._cdata for tensor in unwritten}


def _expect_no_meta(modules: Iterable[Owned]) -> None:
    """Raise ValueError, naming them, if modules hold tensors on meta that they have not registered."""
    left = [
        owned.named(name)
        for owned in modules
        for name, value in vars(owned.module).items()
        if any(map(_is_lost, _pytree.tree_leaves(value)))
    ]
    if left:
        raise ValueError(
            f"still on 'meta' after init=: {', '.join(map(repr, left))}; what a constructor computes must be "
            "registered as a parameter or buffer, or be made outside of torch.device('meta')"
        )


def _is_lost(leaf: object) -> bool:
    # One with a graph was computed from parameters, as weight_norm does, and is computed anew in each forward.
    return isinstance(leaf, Tensor) and leaf.is_meta and leaf.grad_fn is None


def _expect_values(modules: Iterable[Owned], memory: Memory) -> None:
    left = {owned.named(name): None for owned in modules for name, t in owned.tensors() if memory.is_unwritten(t)}
    if left:
        raise ValueError(
            f"init= has not written to {', '.join(map(repr, left))}; initialise them too, or build them with data, "
            "outside of torch.device('meta')"
        )
