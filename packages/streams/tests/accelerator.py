"""A fake accelerator of any type: it computes nothing, but tracks dependencies between streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

KINDS = ("cuda", "xpu", "mps", "privateuseone")


class FakeStream:
    """A queue that stores only its length, and how far it has waited for other queues."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.device = device
        self.device_index = device.index
        self.device_type = device.type
        self.number = number
        self.queued = 0
        self.seen: dict[FakeStream, int] = {}
        self.synchronised = False
        self.clock = 0.0
        """Seconds; events are when they are recorded."""

    def work(self) -> None:
        """Queue something."""
        self.queued += 1
        self.synchronised = False

    def wait_event(self, event: FakeEvent) -> None:
        for stream, position in event.seen.items():
            self.seen[stream] = max(position, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        self.synchronised = True

    def comes_after(self, other: FakeStream) -> bool:
        """Return whether the next item queued here starts after everything queued in ``other`` so far."""
        return other is self or self.seen.get(other, 0) >= other.queued

    def __enter__(self) -> None:
        raise AssertionError("a stream of torch entered by two threads restores the wrong one")


class FakeEvent:
    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        self.device = device
        self.timed = enable_timing
        self.seen: dict[FakeStream, int] = {}
        self.synchronised = False

    def record(self, stream: FakeStream) -> None:
        assert stream.device == self.device
        self.seen = {**stream.seen, stream: stream.queued}
        self.at = stream.clock

    def synchronize(self) -> None:
        self.synchronised = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed
        assert end.timed
        return 1e3 * (end.at - self.at)


class FakeAccelerator(threading.local):
    """The backend of :mod:`torch.accelerator`; the current device and streams are thread-local."""

    def __init__(self, kind: str, devices: int, streams: dict[tuple[int, int], FakeStream]) -> None:
        self.kind = kind
        self.devices = devices
        self.streams = streams
        self.index = 0
        self.current: dict[int, FakeStream] = {}

    def stream(self, index: int, number: int) -> FakeStream:
        """The stream of that number: 0 is the default one."""
        key = index, number
        return self.streams.setdefault(key, FakeStream(torch.device(self.kind, index), number))

    def make(self, *args: Any, device: torch.device | None = None) -> FakeStream:
        """``torch.Stream(device)``, or ``torch.Stream(number, index, type)``."""
        if len(args) == 3:
            return self.stream(args[1], args[0])
        index = self.indexed(args[0] if args else device)
        return self.stream(index, sum(key[0] == index for key in self.streams) + 1)

    def indexed(self, device: torch.device | None) -> int:
        assert device is None or device.type == self.kind
        return self.index if device is None or device.index is None else device.index

    def default_stream(self, device: torch.device | None = None) -> FakeStream:
        return self.stream(self.indexed(device), 0)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        index = self.indexed(device)
        return self.current.setdefault(index, self.stream(index, 0))

    def set_stream(self, stream: FakeStream) -> None:
        self.current[stream.device.index] = stream

    def set_device_index(self, index: int) -> None:
        assert 0 <= index < self.devices
        self.index = index

    @contextmanager
    def device_index(self, index: int | None) -> Iterator[None]:
        before = self.index
        self.index = before if index is None else index
        try:
            yield
        finally:
            self.index = before


class _StreamType(type):
    """A metaclass that makes fake streams pass ``isinstance``, and creates one when called."""

    fake: FakeAccelerator

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, FakeStream)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.fake.make(*args, **kwargs)


@contextmanager
def accelerator(kind: str, devices: int = 3) -> Iterator[FakeAccelerator]:
    """Give torch an accelerator of that type, with ``devices`` devices."""
    fake = FakeAccelerator(kind, devices, {})
    stream_type = _StreamType("Stream", (), {"fake": fake})
    changes: list[tuple[Any, str, Any]] = [
        (torch.accelerator, "current_accelerator", lambda: torch.device(kind)),
        (torch.accelerator, "device_count", lambda: fake.devices),
        (torch.accelerator, "current_device_index", lambda: fake.index),
        (torch.accelerator, "set_device_index", fake.set_device_index),
        (torch.accelerator, "device_index", fake.device_index),
        (torch.accelerator, "current_stream", fake.current_stream),
        (torch.accelerator, "set_stream", fake.set_stream),
        (torch, "Stream", stream_type),
        (torch, "Event", FakeEvent),
    ]
    if kind == "cuda":
        changes += [
            (torch.cuda, "Stream", stream_type),
            (torch.cuda, "current_stream", fake.current_stream),
            (torch.cuda, "default_stream", fake.default_stream),
        ]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield fake
