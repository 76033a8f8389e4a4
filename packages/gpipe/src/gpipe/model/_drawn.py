"""Detect random numbers that a replay uses, because micro-batches used different ones at the same point.

A dropout after the embedding is harmless: only the first block uses its result, and the block's output is known. But
if the model's output depends on a result, its random numbers would not match the ones that the blocks used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._current import current, doing
from .._torch import is_intercepting, set_intercepting
from ..checkpoint._random import PROCESS
from ..values._by_tensor import ByTensor


class Draws:
    """Counts the draws of this thread inside :meth:`watched`, and tracks the tensors that depend on them.

    Args:
        drew: the names of the generators of Python and NumPy that the micro-batches used between blocks.
    """

    module = None

    def __init__(self, drew: Collection[str]) -> None:
        self.count, self._drew = 0, drew
        self._around: Any = current.work.rng
        self._tensors = ByTensor[bool]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = is_intercepting()
        try:
            set_intercepting(True)
            with doing(rng=self):
                yield
        finally:
            set_intercepting(before)

    # The interface of CellRNG.

    def draw(self) -> torch.Generator:
        self.count += 1
        generator: torch.Generator = PROCESS if self._around is None else self._around.draw()
        return generator

    def draw_on(self, device: torch.device) -> None:
        self.count += 1
        if self._around is not None:
            self._around.draw_on(device)

    def saw(self, generator: torch.Generator) -> None:
        self.count += 1
        if self._around is not None:
            self._around.saw(generator)

    # Tensors that depend on draws.

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._tensors[tensor] = True

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._tensors

    def elsewhere(self) -> str:
        """Return the name of a generator outside torch that was used, Python's or NumPy's, or an empty string."""
        return next(iter(self._drew), "")
