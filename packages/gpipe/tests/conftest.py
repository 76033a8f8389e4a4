"""Fixtures that several files ask for by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from .sweeps import sweeps as sweeps
from .worlds import World


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small work is done sooner so, and the caller's share of the threads changes no order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What waits for the garbage collector is kept too long already."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """Processes that talk to each other, by their number; those of the same number are the same."""
    opened: dict[int, World] = {}

    def of(size: int) -> World:
        if size not in opened or not all(process.is_alive() for process in opened[size].processes):
            opened[size] = World(size)
        return opened[size]

    yield of
    for each in opened.values():
        each.close()
