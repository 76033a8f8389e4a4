"""Restore buffers that a model's own operations have modified, because micro-batches or a replay repeat these."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint._state import is_small
from ..values._by_tensor import ByTensor


class Kept(NamedTuple):
    """A buffer, its version, and a copy of it."""

    buffer: Tensor
    version: int
    copy: Tensor


def copy_small_buffers(buffers: Iterable[Tensor]) -> list[Kept]:
    """Copy small ``buffers``, except on ``meta`` or fake ones. Large ones are tables, which forwards do not modify."""
    return [Kept(each, each._version, each.detach().clone()) for each in buffers if is_small(each) and has_data(each)]


def has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and getattr(tensor, "fake_mode", None) is None


@torch.no_grad()
def restore(buffers: Iterable[Kept]) -> None:
    """Restore the values of modified buffers."""
    for buffer, version, before in buffers:
        if buffer._version != version:
            buffer.copy_(before)
        elif not torch.equal(buffer, before):
            # Batch norm updates its statistics without a new version, so this must not create one either: the backward
            # would raise.
            buffer.data.copy_(before)


Held = dict[str, Any]
"""The buffers or attributes of a module. The keys are their names."""


def outside(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules outside ``blocks``."""
    inside = {module for block in blocks for module in block.modules()}
    return [module for module in model.modules() if module not in inside]


def copy_dicts(held: Iterable[Held]) -> list[tuple[Held, Held]]:
    return [(each, dict(each)) for each in held]


def give_back(copies: Iterable[tuple[Held, Held]]) -> None:
    """Restore the objects that modules held when ``copies`` were created, and remove new ones."""
    for held, before in copies:
        for name in held.keys() - before.keys():
            del held[name]
        held.update(before)


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of ``modules`` afterwards: their buffers, hooks, dicts and lists.

    For example, transformers' models register hooks in the first forward that needs them, and remember that they did.
    """
    held = [vars(module) for module in modules]
    values = [value for attributes in held for value in attributes.values()]
    copies = copy_dicts([*held, *(value for value in values if type(value) in (dict, OrderedDict))])
    lists = [(value, [*value]) for value in values if type(value) is list]
    try:
        yield
    finally:
        give_back(copies)
        for value, before in lists:
            value[:] = before


class AfterBlocks:
    """The buffers that a forward modifies after its last block. A replay will modify them again.

    Args:
        held: the buffers of modules outside blocks.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self.begin()

    def begin(self) -> None:
        """Start over, because a block has been called, and it may be the last one."""
        self._kept: dict[int, list[Kept]] = {}
        self._made = ByTensor[bool]()
        self._before = copy_dicts(self._held)

    def keep(self, buffer: Tensor) -> None:
        """Save the values of ``buffer``, which an operation may modify."""
        if id(buffer) not in self._kept:
            self._kept[id(buffer)] = copy_small_buffers([buffer])

    def note_result(self, tensor: Tensor) -> Tensor:
        """Note that an operation has returned ``tensor``, because the model may assign it to a buffer."""
        self._made[tensor] = True
        return tensor

    def restore(self) -> None:
        for buffers in self._kept.values():
            restore(buffers)
        for held, before in self._before:
            for name, buffer in before.items():
                if name in held and held[name] in self._made:
                    held[name] = buffer
