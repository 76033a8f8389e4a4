"""Counts the storages that are allocated and freed while layers run."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from streams import DispatchMode

from ._flops import flops
from ._storages import storages


class AllocationTracker(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, counts the bytes of storages that operations create, and the FLOPs they do.

    Each storage is counted as long as it is alive. Storages that existed before are not counted.

    Attributes:
        peak: the peak of these bytes, with the memory that CPU kernels of convolutions use while they run.
        flops: floating-point operations.
        uncounted: names of operations that may multiply matrices, and have no FLOP formula.
        unsized: whether a storage was made with 0 bytes because its size is not known without data.

    >>> x = torch.ones(10, 10, requires_grad=True)
    >>> with AllocationTracker() as tracker:
    ...     y = (x @ x).exp()
    >>> tracker.alive(), tracker.peak, tracker.flops
    (400, 800, 2000)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.flops = self._now = 0
        self.uncounted: set[str] = set()
        self.unsized = False
        # Appended to by any thread that drops the last reference to a storage, at any time; read by the counting
        # thread.
        self._freed: deque[int] = deque()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def alive(self, without: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of the storages allocated so far and not freed yet.

        Args:
            without: tensors that do not count.

        Returns:
            Bytes.
        """
        self._drain_freed()
        others = {storage._cdata for tensor in without for storage in storages(tensor)}
        living = [ref() for key, (ref, _) in self._alive.items() if key not in others]
        return sum(storage.nbytes() for storage in living if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A tensor that is made from Python data is not seen when it is made, but first as the input of this operation.
        old = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        self._note(result, {storage._cdata for storage in storages(old)}, workspace(func, args, result))
        found = flops(func, args, kwargs, result)
        if found is None:
            self.uncounted.add(str(func))
        self.flops += found or 0
        return result

    def _note(self, result: Any, old: set[int], temporary: int) -> None:
        self._drain_freed()  # first, since the address of a freed storage may be used again
        for leaf in tree_leaves(result):
            for storage in storages(leaf):
                if storage._cdata not in old and storage._cdata not in self._alive:
                    self._on_alloc(storage, leaf.dtype)
        self.peak = max(self.peak, self._now + temporary)

    def _on_alloc(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = weakref.ref(storage, partial(self._on_free, key)), size
        self._now += size
        # Kernels of oneDNN on fake tensors make workspaces without bytes.
        self.unsized |= size == 0 and dtype is torch.uint8

    def _on_free(self, key: int, ref: object) -> None:
        self._freed.append(key)

    def _drain_freed(self) -> None:
        while self._freed:
            _, size = self._alive.pop(self._freed.popleft())
            self._now -= size


_aten = torch.ops.aten
_KERNELS = frozenset({_aten.convolution, _aten.convolution_backward, _aten.native_batch_norm_backward})


def workspace(func: Any, args: Any, result: Any) -> int:
    """Bytes that the kernel of ``func`` needs at its fullest moment, beside its arguments and results; 0 if few.

    It allocates and frees them itself, where no dispatch mode sees it.

    oneDNN uses a memory order of its own: a convolution has copies of all that it reads, and later one of its result; a
    backward has copies of the gradient and the input, or twice the gradient of the input. Values whose channels are
    last need none. (Measured on x86 processors by the allocator's events.)
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet not in _KERNELS:
        return 0
    given, made = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in (args, result))
    if given[0].device.type != "cpu" or (given[0].dim() == 4 and given[0].stride(1) == 1):
        return 0
    if packet is _aten.convolution:
        is_transposed = args[6]
        return int(max(given[0].nbytes + given[1].nbytes, (1 + is_transposed) * made[0].nbytes))
    if packet is _aten.convolution_backward:
        gradient, x, weight = (each.nbytes for each in given[:3])
        return int(max(gradient + x + weight, 2 * x if args[-1][0] else 0))
    return int(given[1].nbytes)
