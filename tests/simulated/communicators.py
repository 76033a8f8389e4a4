"""Process groups for the simulated accelerator, modeled on NCCL: transfers run on separate streams.

A group has one stream per device, from the pool of streams that are shared. A transfer waits there for the work queued
on the caller's current stream, and ``wait()`` makes the then-current stream wait for the transfer. For the ordering
checks, memory is read and written there. The bytes are sent by gloo. Sent bytes are copied immediately, but leave only
after the earlier transfers on that stream, and those the caller's stream has waited for, are finished on both ends.
Received bytes are written on ``wait()``; until then, the tensor has different contents. The device cannot wait, so a
wait for data that has not arrived blocks the host. Tensors are kept alive until the transfer is awaited or polled.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streams import current_stream, new_stream, use_stream, wait_stream

from . import accelerator

NAME = "simulated_ccl"

FOREIGN = 0xAB
"""The value of every byte of memory that is waiting for data."""

_LONG = timedelta(minutes=10)


def register() -> None:
    """Make torch use such groups for simulated devices, from now on."""
    accelerator.library()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, devices=[accelerator.TYPE])


opened: list[Communicator] = []
"""Communicators of this process."""

unpolled: set[Transfer] = set()
"""Transfers that were never awaited, or polled as finished."""


class Communicator(dist.ProcessGroup):
    """A group that sends from device to device.

    Attributes:
        streams: one stream per device.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.streams: dict[torch.device, Any] = {}
        self._bytes = dist.ProcessGroupGloo(store, rank, size, _LONG)
        self._under_way: queue.SimpleQueue[_Transfer] = queue.SimpleQueue()
        self._all: list[_Transfer] = []
        self._aborted = False
        threading.Thread(target=self._finish, daemon=True).start()
        opened.append(self)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Transfer:
        (tensor,) = tensors
        stream, before = self._behind(tensor.device)
        with use_stream(stream):
            host = _pinned(tensor).copy_(tensor, non_blocking=True)
        transfer = self._asked(_Transfer(lambda: self._bytes.send([host], target, tag), host, before), stream)
        return Transfer(transfer, tensor, stream, arrives=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Transfer:
        (tensor,) = tensors
        stream, before = self._behind(tensor.device)
        with use_stream(stream):
            tensor.fill_(FOREIGN)
        host = _pinned(tensor)
        transfer = self._asked(_Transfer(lambda: self._bytes.recv([host], source, tag), host, before), stream)
        return Transfer(transfer, tensor, stream, arrives=True)

    def abort(self) -> None:
        self._aborted = True
        for transfer in self._all:
            transfer.done.set()

    def _behind(self, device: torch.device) -> tuple[Any, list[_Transfer]]:
        """The stream of that device, which waits for the current one; and the transfers that hold either up."""
        if self._aborted:
            raise RuntimeError("the communicator was aborted")
        stream, now = self.streams.get(device), current_stream(device)
        if stream is None:
            stream = self.streams[device] = new_stream(device)
        wait_stream(stream, now)
        return stream, _holding_up(now) + _holding_up(stream)

    def _asked(self, transfer: _Transfer, stream: Any) -> _Transfer:
        _before[stream] = [*_holding_up(stream), transfer]
        self._all = [each for each in self._all if not each.done.is_set()] + [transfer]
        self._under_way.put(transfer)
        return transfer

    def _finish(self) -> None:
        while True:
            self._under_way.get().finish()


class _Transfer:
    """The bytes of one, on the host.

    Args:
        begin: begins it.
        before: transfers that have to be done first.
    """

    def __init__(self, begin: Callable[[], Any], host: Tensor, before: list[_Transfer]) -> None:
        self.host = host
        self.arrived = False
        self.done = threading.Event()
        self._begin = begin
        self._before = before

    def finish(self) -> None:
        for each in self._before:
            each.done.wait()
        with suppress(RuntimeError):  # the peer is gone, which a device cannot detect
            self._begin().wait()
            self.arrived = True
            self.done.set()


_before: dict[Any, list[_Transfer]] = {}
"""Unfinished transfers that each stream has queued or waits for."""


def _holding_up(stream: Any) -> list[_Transfer]:
    """Return the transfers that must finish before work queued on ``stream`` now."""
    return [each for each in _before.get(stream, ()) if not each.done.is_set()]


class Transfer(dist.Work):
    """The result of :meth:`Communicator.send` and ``recv``.

    Args:
        tensor: the tensor to send, or to receive into.
    """

    def __init__(self, transfer: _Transfer, tensor: Tensor, stream: Any, *, arrives: bool) -> None:
        super().__init__()
        self._transfer = transfer
        self._tensor: Tensor | None = tensor
        self._stream = stream
        self._arrives = arrives
        unpolled.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._arrives and self._tensor is not None:
            self._transfer.done.wait()
            if self._transfer.arrived:
                with use_stream(self._stream):
                    self._tensor.copy_(self._transfer.host, non_blocking=True)
        now = current_stream(self._stream.device)
        _before[now] = [*_holding_up(now), self._transfer]
        wait_stream(now, self._stream)
        self._let_go()
        return True

    def is_completed(self) -> bool:
        done = self._transfer.done.is_set()
        if done and not self._arrives:
            self._let_go()
        return done

    def _let_go(self) -> None:
        unpolled.discard(self)
        self._tensor = None


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    return Communicator(store, rank, size)
