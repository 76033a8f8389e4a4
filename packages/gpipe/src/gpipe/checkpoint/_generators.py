"""The generator of the process, from which torch draws on the CPU unless it is given another one."""

from __future__ import annotations

from typing import Final

import torch

from .._forks import fork_lock

PROCESS: Final = torch.default_generator
"""The generator of the process."""

process_lock = fork_lock()
"""Held while the state of the process's generator is read and then changed."""


def is_process(generator: torch.Generator) -> bool:
    """Whether ``generator`` is that of the process. See :func:`are_one`."""
    if generator.device.type != "cpu" or generator.initial_seed() != PROCESS.initial_seed():
        return False
    with process_lock:
        return are_one(generator, PROCESS)


def are_one(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether both objects are the same generator: operations get a new Python object for it each time."""
    state = a.get_state()
    if a.device != b.device or not torch.equal(b.get_state(), state):
        return False
    torch.empty(1, device=a.device).uniform_(generator=a)
    moved = not torch.equal(b.get_state(), state)
    a.set_state(state)
    return moved
