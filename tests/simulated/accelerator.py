"""The Python side of the simulated accelerator: devices ``simulated:0`` to ``simulated:2``, streams and events.

Kernels run immediately, on the CPU, so that results are always right. The simulator checks ordering instead: waits
and events must order each access to a block of memory after the accesses it conflicts with. So a race is reported
whenever it is possible, not only when it happens.
"""

import atexit
import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import torch

from streams import use_stream, waiting

from . import build
from .races import Race, Races

TYPE = "simulated"
DEVICES = 3

races = Races()


@cache
def library() -> ModuleType:
    """The device, built if need be. From the first call on it is torch's accelerator, in the whole process."""
    torch.utils.rename_privateuse1_backend(TYPE)
    loaded = build.load()
    torch._register_device_module(TYPE, _module())
    loaded.listen(races)
    atexit.register(loaded.listen, None)
    waiting.SimpleQueue, waiting.Semaphore = Queue, Semaphore
    return loaded


class Queue(SimpleQueue[Any]):
    """A queue between threads. A receiver inherits the sender's knowledge of completed work."""

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        super().put((library().known(), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        known, item = super().get(block, timeout)
        library().take_over(known)
        return item


class Semaphore:
    """A semaphore between threads. An acquiring thread inherits the releasing thread's knowledge."""

    def __init__(self, value: int) -> None:
        assert not value
        self._queue = Queue()

    def release(self) -> None:
        self._queue.put(None)

    def acquire(self) -> None:
        self._queue.get()


def device(k: int | None) -> torch.device:
    """The k-th simulated device; the CPU for None."""
    return torch.device("cpu") if k is None else torch.device(TYPE, k)


def new_stream(k: int, priority: int = 0) -> torch.Stream:
    """Create a stream on device ``k`` that waits for the work queued on the current one."""
    stream = torch.Stream(device=device(k), priority=priority)
    stream.wait_stream(torch.accelerator.current_stream(device(k)))
    return stream


@contextmanager
def using(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Make each of ``streams`` the current one of its device inside the block; the current device stays."""
    with ExitStack() as stack:
        before = torch.accelerator.current_device_index()
        for stream in streams:
            stack.enter_context(use_stream(stream))
        torch.accelerator.set_device_index(before)
        yield


def found() -> list[Race]:
    """The races since the last call, once the host has waited for everything."""
    library().synchronise()
    return races.take()


@contextmanager
def no_races() -> Iterator[None]:
    """AssertionError if anything inside the block is not in order."""
    found()
    yield
    remaining = found()
    assert not remaining, "\n".join(map(str, remaining[:5]))


def used() -> int:
    """Bytes in use on all devices."""
    gc.collect()
    return sum(library().used(k) for k in range(DEVICES))


@contextmanager
def limited(k: int, size: int) -> Iterator[None]:
    """Limit device ``k`` to ``size`` bytes more than are in use."""
    gc.collect()  # free garbage first, so that it does not count
    library().limit(k, library().used(k) + size)
    try:
        yield
    finally:
        library().limit(k, 0)


def _module() -> ModuleType:
    """Create the module that torch expects as ``torch.simulated``."""
    module = ModuleType(f"torch.{TYPE}")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": _seed_all,
        "get_rng_state": lambda device: torch.ops.simulated.rng_state(_index(device)),
        "set_rng_state": lambda state, device: torch.ops.simulated.set_rng_state(state, _index(device)),
    }.items():
        setattr(module, name, value)
    return module


def _seed_all(seed: int) -> None:
    for k in range(DEVICES):
        torch.ops.simulated.manual_seed(seed, k)


def _index(device: torch.device | str | int) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
