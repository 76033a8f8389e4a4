"""The generator of the process, from which torch draws on the CPU unless it is given another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from .._forks import fork_lock

PROCESS: Final = torch.default_generator
"""The generator of the process."""

borrowing = fork_lock()
"""Held while the process's generator has the state of another one. Hold it to read the generator's own state."""


@contextmanager
def lent(generator: torch.Generator) -> Iterator[None]:
    """A context in which the process's generator has the state of ``generator``, which takes the new state."""
    with borrowing:
        before = PROCESS.get_state()
        PROCESS.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(PROCESS.get_state())
            PROCESS.set_state(before)


def is_process(generator: torch.Generator) -> bool:
    """Whether ``generator`` is that of the process. See :func:`are_one`."""
    if generator.device.type != "cpu":
        return False
    with borrowing:
        return generator.initial_seed() == PROCESS.initial_seed() and are_one(generator, PROCESS)


def are_one(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether both objects are the same generator: operations get a new Python object for it each time."""
    state = a.get_state()
    if a.device != b.device or not torch.equal(b.get_state(), state):
        return False
    torch.empty(1, device=a.device).uniform_(generator=a)
    moved = not torch.equal(b.get_state(), state)
    a.set_state(state)
    return moved
