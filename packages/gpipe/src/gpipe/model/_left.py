"""Detect tensors that blocks leave in attributes. They belong to the micro-batch whose forward set them last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ..checkpoint._state import last_entry
from ._tree import changed

Found = dict[int, tuple[ref[Tensor], str]]
"""Tensors by identity, with the names of the attributes."""


class Left:
    """The tensors that blocks of a model have left in attributes in one run, for all micro-batches."""

    def __init__(self) -> None:
        self._leaves: dict[nn.Module, bool] = {}
        self._found: Found = {}

    def watch(self, name: str, block: nn.Module) -> Callable[[Any], None]:
        """Inspect ``block`` before its call. Return a function to call with its arguments and output afterwards."""
        if not self._leaves.get(block, True):  # its first call has left nothing
            return lambda values: None
        before = _tensors_of(name, block)

        def look(values: Any) -> None:
            known = {*before}
            changed(values, lambda tensor: known.add(id(tensor)) or tensor)  # type: ignore[func-returns-value]
            left = {key: each for key, each in _tensors_of(name, block).items() if key not in known}
            self._leaves[block] = bool(left) or self._leaves.get(block, False)
            self._found.update(left)

        return look

    def expect_not(self, tensor: Tensor, model: nn.Module) -> None:
        """Raise RuntimeError if ``tensor``, which ``model`` itself uses, was left by a block."""
        found = self._found.get(id(tensor))
        if found is not None and found[0]() is tensor:
            raise RuntimeError(
                f"{type(model).__name__} reads {found[1]}, where a block has left a tensor; by the time of the "
                "read, the block may have stored a different micro-batch's tensor there; let the block return it"
            )


def _tensors_of(name: str, block: nn.Module) -> Found:
    """Return the tensors in attributes of ``block``, or at the end of lists in attributes."""
    found: Found = {}
    for path, module in block.named_modules(prefix=name):
        if not type(module).__module__.startswith("torch.nn."):
            for attribute, value in vars(module).items():
                last = last_entry(value)
                if isinstance(last, Tensor):
                    found[id(last)] = ref(last), f"{path}.{attribute}"
    return found
