"""The random numbers of a run on several ranks: all use a seed that the rank of the first stage announces."""

from __future__ import annotations

import torch

from ..checkpoint._generators import PROCESS, process_lock
from ..checkpoint._random import RunRNG


class AgreedRNG(RunRNG):
    """Random numbers from a seed that all ranks know.

    Args:
        seed: what :func:`next_seed` returned on the first rank.

    Attributes:
        drew: whether a random number was drawn in this run.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._agreed = seed
        self.drew = False

    @property
    def seed(self) -> int:
        self.drew = True
        return self._agreed


def next_seed() -> int:
    """The seed that a run would draw from torch's generator; the generator does not change."""
    copy = torch.Generator().set_state(PROCESS.get_state())
    return int(torch.randint(2**32, (), generator=copy))


def take_seed() -> None:
    """Draw that seed from torch's generator, as a run in one process does if a layer draws random numbers."""
    with process_lock:
        torch.randint(2**32, (), device="cpu", generator=PROCESS)
