"""The tensors that a cell saves for its backward, which are on the host in between (``checkpoint="offload"``).

::

    compute    forward --x----------->x freed      x allocated----------->\\ backward
    outward               \\--copy--/                \\                    /
    inward                                            \\--copy-----------/

All memory is allocated and freed in the order of the computations, which wait for the copies. So it is reused at once,
and a device holds the tensors of two cells, or of three while one leaves and another arrives, however slow the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from streams import AbstractEvent, AbstractStream, current_stream, record_event, use_stream, wait_event

from .._torch import count_storage_uses, no_dispatch_modes, no_function_modes, saved_tensors_hooks
from ..transport._copy import to_host
from ..values._leaves import storage_id
from ._offloaded import HostLink

SMALL = 1 << 12
"""Storages of fewer bytes stay on the device, because a copy has a cost of its own."""


class Leaving:
    """The storages of one worker that are being copied to the host."""

    def __init__(self) -> None:
        self._copied: list[tuple[AbstractStream, AbstractEvent, Sequence[Tensor]]] = []

    def add(self, compute: AbstractStream, sent: AbstractEvent, storages: Sequence[Tensor]) -> None:
        self._copied.append((compute, sent, storages))

    def free(self) -> None:
        """Free the storages, in the order of the computations, which wait until they are copied."""
        while self._copied:
            compute, sent, storages = self._copied.pop()
            wait_event(compute, sent)
            del storages


class SavedTensors:
    """The tensors that one cell saves for its backward.

    Tensors remain on the device if anything else uses their memory, such as parameters, inputs and outputs: to copy
    them would free nothing. Neither do the tensors of other devices and of most subclasses move.

    Args:
        link: the streams of the device that copy from and to the host.
        compute: the stream of the computations.
        leaving: the storages of the same worker that are being copied to the host.
    """

    def __init__(self, device: torch.device, link: HostLink, compute: AbstractStream, leaving: Leaving) -> None:
        self._device, self._link, self._compute, self._leaving = device, link, compute, leaving
        # Weak references, so that a tensor is freed as soon as the operation that saved it has run its backward.
        self._entries: list[ref[_Entry]] = []
        self._storages: list[ref[_Storage]] = []
        self._ready: AbstractEvent = None
        self._is_fetched = self._is_awaited = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Collect the tensors that operations of this thread save."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, _Entry.load):
            own = saved_tensors_hooks()
            try:
                yield
            finally:
                if saved_tensors_hooks() != own:
                    raise RuntimeError(_ACROSS)

    def _save(self, tensor: Tensor) -> _Entry:
        kind = type(tensor)
        # A class with a __torch_dispatch__ of its own makes the copy that torch's hooks return.
        if kind not in (Tensor, nn.Parameter) and kind.__torch_dispatch__ == Tensor.__torch_dispatch__:
            raise RuntimeError(_SUBCLASS.format(kind.__name__))
        entry = _Entry(self, tensor)
        self._entries.append(ref(entry))
        return entry

    def offload(self) -> None:
        """Queue the copies to the host."""
        self._leaving.free()
        found = _by_storage(entry for each in self._entries if (entry := each()) is not None)
        self._entries = []
        # Move the groups whose entries hold the only references to the storage.
        groups = [group for group in found if count_storage_uses(group[0].tensor) == len(group) + 1]
        if not groups:
            return
        saved = record_event(self._compute)
        wait_event(self._link.outward, saved)
        with use_stream(self._link.outward), torch.no_grad(), no_dispatch_modes():
            copied = [self._copy_storage(group) for group in groups]
        sent = record_event(self._link.outward)
        self._leaving.add(self._compute, sent, copied)

    def _copy_storage(self, group: Sequence[_Entry]) -> Tensor:
        """Queue the copy of the storage of ``group``, and return the storage."""
        bytes_of = _view_storage_as_bytes(group[0].tensor)
        host = bytes_of.clone() if self._device.type == "cpu" else to_host(bytes_of)
        storage = _Storage(host)
        self._storages.append(ref(storage))
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        for entry in group:
            entry.leave(storage, empty)
        return bytes_of

    def prefetch(self) -> None:
        """Queue the copies to the device."""
        self._fetch(self._compute)

    def _fetch(self, compute: AbstractStream) -> None:
        """Queue the copies, to memory of ``compute``, which is the current stream."""
        self._leaving.free()
        if self._is_fetched:
            return
        self._is_fetched = True
        storages = [storage for each in self._storages if (storage := each()) is not None]
        with torch.no_grad(), torch.inference_mode(False):
            places = [torch.empty_like(storage.bytes, device=self._device) for storage in storages]
            # After earlier computations on this memory, which in turn wait for its copies to the host.
            allocated = record_event(compute)
            wait_event(self._link.inward, allocated)
            with use_stream(self._link.inward):
                for storage, place in zip(storages, places, strict=True):
                    storage.arrive(place.copy_(storage.bytes, non_blocking=True))
        self._ready = record_event(self._link.inward)

    def arrive(self) -> None:
        """Make the computations wait for the copies to the device."""
        self._arrive(self._compute)

    def _arrive(self, compute: AbstractStream) -> None:
        if self._is_fetched and not self._is_awaited:
            self._is_awaited = True
            wait_event(compute, self._ready)

    def bring(self) -> None:
        """Bring the tensors to the device now, if no action has announced the backward that needs them."""
        if self._is_awaited:
            return
        compute = current_stream(self._device)
        self._fetch(compute)
        self._arrive(compute)


class _Storage:
    """A storage that was copied to the host.

    Attributes:
        bytes: its bytes, on the host or, after their return, on the device.
        version: the version counter of ``bytes``.
    """

    __slots__ = ("__weakref__", "bytes", "version")

    def __init__(self, host: Tensor) -> None:
        self.bytes, self.version = host, host._version

    def arrive(self, place: Tensor) -> None:
        self.bytes, self.version = place, place._version


class _Layout(NamedTuple):
    """The layout of a tensor in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def of(self, storage: Tensor) -> Tensor:
        """Return the tensor with this layout in the bytes of ``storage``."""
        count = storage.numel() // self.dtype.itemsize
        whole = storage[: count * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, self.offset)


class _Entry:
    """A tensor that an operation has saved.

    Attributes:
        tensor: the tensor. While it is on the host, it has no memory, but still the version counter of the original.
    """

    __slots__ = ("__weakref__", "_layout", "_of", "_shape", "_storage", "_version", "tensor")

    def __init__(self, of: SavedTensors, tensor: Tensor) -> None:
        self._of = of
        self._shape, self._version = tensor.shape, tensor._version
        self._storage: _Storage | None = None
        self._layout: _Layout | None = None
        # Detached, because an operation may save its output, which refers to the graph.
        with no_function_modes():
            self.tensor = tensor.detach()

    @property
    def may_leave(self) -> bool:
        """True if the tensor has all bytes of its storage, and has not been modified since it was saved."""
        tensor = self.tensor
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._of._device
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= SMALL
            and tensor._version == self._version
        )

    def leave(self, storage: _Storage, empty: Tensor) -> None:
        tensor = self.tensor
        self._layout = _Layout(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        self._storage = storage
        tensor.data = empty

    def load(self) -> Tensor:
        """Return the tensor, for the backward of the operation that has saved it."""
        storage, layout = self._storage, self._layout
        if storage is not None:
            self._of.bring()
        # Torch does not check tensors that hooks return.
        if self.tensor._version != self._version or (storage and storage.bytes._version != storage.version):
            raise build_in_place_error(self._shape, 'a layer with checkpoint="offload"')
        if storage is None or layout is None:
            return self.tensor
        with no_function_modes():
            return layout.of(storage.bytes)


def expect_no_hooks() -> None:
    """Raise RuntimeError if this thread has hooks for saved tensors other than an enclosing pipe's."""
    hooks = saved_tensors_hooks()
    if hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavedTensors):
        raise RuntimeError(_AROUND)


def _by_storage(entries: Iterable[_Entry]) -> list[list[_Entry]]:
    """Return the entries that may leave, grouped by their storage."""
    found: dict[int, list[_Entry]] = {}
    for entry in entries:
        if entry.may_leave:
            found.setdefault(storage_id(entry.tensor), []).append(entry)
    return [*found.values()]


def _view_storage_as_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def build_in_place_error(shape: Sequence[int], whose: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(shape)}, which {whose} needs for its backward; change a clone instead"
    )


_AROUND = (
    "a pipe with checkpoint='offload' is called inside torch.autograd.graph.saved_tensors_hooks or save_on_cpu, whose "
    "place its own hooks would take; leave these, or use checkpoint='never' or 'always'"
)

_ACROSS = (
    "a layer or the model enters torch.autograd.graph.saved_tensors_hooks and leaves it in another partition; with "
    "checkpoint='offload' each partition has hooks of its own, so use 'never' or 'always' for these partitions"
)

_SUBCLASS = (
    "an operation saves a tensor of class {} for its backward, which torch's hooks for saved tensors would return as a "
    "plain tensor; use checkpoint='never' or 'always' for this partition instead of 'offload'"
)
