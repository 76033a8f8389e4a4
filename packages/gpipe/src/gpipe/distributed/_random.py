"""Random numbers of a run that several ranks do together: all take them from the seed that the first rank has."""

from __future__ import annotations

import torch

from .._current import setting
from ..checkpoint._random import RunRNG
from ..checkpoint._served import PROCESS, borrowing


class AgreedRNG(RunRNG):
    """Seeded by what all ranks have agreed on.

    Args:
        seed: as :func:`next_seed` gave it on the first rank.

    Attributes:
        drew: whether anybody asked for it.
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
    """What a run would take from torch's generator, which stays as it is."""
    with setting(rng_paused=True), borrowing:
        copy = torch.Generator()
        copy.set_state(PROCESS.get_state())
        return int(torch.randint(2**32, (), generator=copy))


def take_seed() -> None:
    """Take that number from torch's generator, as a run in one process does if a layer draws."""
    with setting(rng_paused=True), borrowing:
        torch.randint(2**32, (), device="cpu", generator=PROCESS)
