"""Counts the storages that are allocated and freed while a layer runs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from streams import DispatchMode

from ._flops import flops
from ._storages import storages


class AllocationTracker(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, counts the bytes of storages that operations create, and the FLOPs they do.

    It has weak references to storages: each is counted as long as Python or the autograd graph keeps it alive. Storages
    that existed before (parameters, inputs, their views and in-place results) are not counted.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.flops = 0
        self._now = 0
        # Appended to by any thread that drops the last reference to a storage, at any time; read by the counting
        # thread.
        self._deaths: deque[tuple[int, int]] = deque()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, torch.dtype]] = {}

    def alive(self, without: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of the storages allocated so far and not freed yet, except those of the tensors in ``without``.

        Args:
            without: tensors that do not count.

        Returns:
            Bytes.
        """
        self._bury()
        others = {storage._cdata for tensor in without for storage in storages(tensor)}
        living = ((key, ref()) for key, (ref, _, _) in self._alive.items() if key not in others)
        return sum(storage.nbytes() for _, storage in living if storage is not None)

    def holds_empty_workspace(self) -> bool:
        """Whether a storage is a workspace of unknown size: fake oneDNN kernels make these with 0 bytes."""
        return any(
            dtype is torch.uint8 and storage.nbytes() == 0
            for ref, _, dtype in self._alive.values()
            if (storage := ref()) is not None
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A tensor that is made from Python data is not seen when it is made, but first as the input of this operation.
        old = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        self._note(result, {storage._cdata for storage in storages(old)})
        self.flops += flops(func, args, kwargs, result)
        return result

    def _note(self, result: Any, old: set[int]) -> None:
        self._bury()  # first, since the address of a freed storage may be used again
        for leaf in torch.utils._pytree.tree_leaves(result):
            for storage in storages(leaf):
                if storage._cdata not in old and storage._cdata not in self._alive:
                    self._born(storage, leaf.dtype)

    def _born(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = (weakref.ref(storage, partial(self._died, key, size)), size, dtype)
        self._now += size
        self.peak = max(self.peak, self._now)

    def _died(self, key: int, size: int, ref: object) -> None:
        self._deaths.append((key, size))

    def _forget(self, storage: torch.UntypedStorage) -> int:
        """Count a storage as freed. Returns its bytes, if it was alive."""
        self._bury()
        _, size, _ = self._alive.pop(storage._cdata, (None, 0, None))
        self._now -= size
        return size

    def _bury(self) -> None:
        """Handle the storages that were freed since the last call."""
        while self._deaths:
            self._gone(*self._deaths.popleft())

    def _gone(self, key: int, size: int) -> None:
        del self._alive[key]
        self._now -= size
