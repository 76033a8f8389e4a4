"""Where a layer is to stand, and what counts there."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gpipe import is_recomputing
from gpipe.skip import Namespace

from .values import tensors


class Tally:
    """How often something happened; in a recomputation nothing does."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        if not is_recomputing():
            with self._lock:
                self.counts[name] += 1


@dataclass
class Site:
    """Where a layer is to stand.

    Attributes:
        value: what it will be given, by example.
        pick: which of the leaves that fit is meant.
        option: which of several variants.
        name: of the layer.
        tally: where its hooks count.
        open: skips that are stashed and not popped yet.
    """

    value: Any
    pick: int
    option: int
    name: str
    tally: Tally
    open: list[Namespace] = field(default_factory=list)

    def place(self, fitting: list[int]) -> int | None:
        return fitting[self.pick % len(fitting)] if fitting else None

    @property
    def alone(self) -> bool:
        """Whether what a layer is given takes no other way too."""
        return len(tensors(self.value)) == 1 and not self.open

    def leaf(self, place: int) -> Tensor:
        return pytree.tree_leaves(self.value)[place]
