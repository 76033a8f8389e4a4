"""The simulated accelerator as torch sees it: devices ``simulated:0`` to ``simulated:2``, with streams and events.

What is computed there is computed at once, on the CPU, so that results are always right. What is checked is the order:
each access of each block of memory must be ordered after those that it conflicts with, by waits and events alone. So a
race shows whenever it could happen, and not only when it does.
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
    """Between threads. Whoever takes an item knows to be done what whoever put it there had waited for."""

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        super().put((library().known(), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        known, item = super().get(block, timeout)
        library().take_over(known)
        return item


class Semaphore:
    """Between threads, too: whoever passes it knows what whoever let it pass had waited for."""

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
    """Another stream of device ``k``, which waits for what the current one has queued."""
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
    """Inside, device ``k`` has ``size`` bytes beside those in use."""
    gc.collect()  # so that nothing is freed inside that was garbage before
    library().limit(k, library().used(k) + size)
    try:
        yield
    finally:
        library().limit(k, 0)


def _module() -> ModuleType:
    """What torch looks for in ``torch.simulated``."""
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
