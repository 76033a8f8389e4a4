"""Track the storages that are allocated and freed while layers run."""

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
    """A dispatch mode that counts the bytes of storages that operations allocate, and their FLOPs.

    A storage counts until it is freed. Storages that existed before the mode do not count.

    Attributes:
        peak: the peak of these bytes, including the workspaces of CPU kernels for convolutions and batch norms.
        flops: floating-point operations.
        uncounted: names of operations that may multiply matrices but have no FLOP formula.
        unsized: True if an operation allocated a workspace of 0 bytes, because its size is unknown for fake tensors.

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
        # Any thread that drops the last reference to a storage appends to it. The counting thread reads it.
        self._freed: deque[int] = deque()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def alive(self, without: Iterable[torch.Tensor] = ()) -> int:
        """Return the bytes of the storages that were allocated and are not freed yet.

        Args:
            without: tensors whose storages do not count.

        Returns:
            The number of bytes.
        """
        self._drain_freed()
        others = {storage._cdata for tensor in without for storage in storages(tensor)}
        living = [ref() for key, (ref, _) in self._alive.items() if key not in others]
        return sum(storage.nbytes() for storage in living if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Tensors from Python data are created without a dispatched operation, and first appear as inputs of lift_fresh.
        old = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        self._note(result, {storage._cdata for storage in storages(old)}, workspace(func, args, result))
        found = flops(func, args, kwargs, result)
        if found is None:
            self.uncounted.add(str(func))
        self.flops += found or 0
        return result

    def _note(self, result: Any, old: set[int], temporary: int) -> None:
        self._drain_freed()  # first, because a new storage may reuse the address of a freed one
        for leaf in tree_leaves(result):
            for storage in storages(leaf):
                if storage._cdata not in old and storage._cdata not in self._alive:
                    self._on_alloc(storage, leaf.dtype)
        self.peak = max(self.peak, self._now + temporary)

    def _on_alloc(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = weakref.ref(storage, partial(self._on_free, key)), size
        self._now += size
        # oneDNN kernels on fake tensors allocate workspaces of 0 bytes.
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
    """Return the peak bytes that the kernel of ``func`` needs besides its arguments and results; 0 if negligible.

    The kernel allocates and frees them internally, invisibly to dispatch modes.

    oneDNN uses its own memory layout. A convolution copies its inputs, and later its result. Its backward copies the
    gradient, the input and the weight, or holds the gradient of the input twice. Tensors in ``channels_last`` need no
    copies. (Measured on x86 processors from allocator events.)
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
