"""Tracks which memory has been written to since it was allocated."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree

from streams import DispatchMode


class Written(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, takes out of ``unwritten`` the storages that operations write to, whichever tensor they go by.

    Args:
        unwritten: addresses of storages.
    """

    supports_higher_order_operators = True

    def __init__(self, unwritten: set[int]) -> None:
        super().__init__()
        self._unwritten = unwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for k, argument in enumerate(getattr(getattr(func, "_schema", None), "arguments", ())):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note(args[k] if k < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _note(self, written: Any) -> None:
        for leaf in _pytree.tree_leaves(written):
            if isinstance(leaf, Tensor):
                self._unwritten.discard(leaf.untyped_storage()._cdata)
