"""The random numbers of a run on several ranks: all use a seed that the rank of the first stage announces."""

from __future__ import annotations

import torch

from ..checkpoint._random import PROCESS, process_lock, state_of


def next_seed() -> int:
    """The seed that a run would draw from torch's generator; the generator does not change."""
    copy = torch.Generator().set_state(state_of(PROCESS))
    return int(torch.randint(2**32, (), generator=copy))


def take_seed() -> None:
    with process_lock:
        torch.randint(2**32, (), device="cpu", generator=PROCESS)
