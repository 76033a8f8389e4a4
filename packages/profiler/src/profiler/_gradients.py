"""Counts the peak of a backward whose parameter gradients are new, and of one that adds them to earlier gradients.

Each is counted with the gradients that the backward begins with, and without them, if they are in other memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._allocations import AllocationTracker
from ._storages import storages


class GradientTracker(AllocationTracker):  # type: ignore[no-untyped-call]
    """Drops the gradients of parameters as soon as they are accumulated.

    So ``peak`` is that of a backward that adds to existing gradients.

    Attributes:
        whole_peak: the peak if the gradients stay.
        given_peak, whole_given_peak: both without the gradients that the backward begins with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole_peak = self.given_peak = self.whole_given_peak = 0
        self._aside = 0
        self._seeds: dict[int, int] = {}

    def restart(self) -> int:
        """The peak so far. Counts a new peak from now on."""
        peak, self.peak = self.peak, self.alive()
        self.whole_peak = self.given_peak = self.whole_given_peak = self.peak
        return peak

    def begin(self, seeds: Iterable[Any]) -> None:
        """Begin a backward with the gradients ``seeds``, before anything else is allocated."""
        made = {storage._cdata for storage in storages(list(seeds))}
        self._seeds = {key: size for key, (_, size, _) in self._alive.items() if key in made}
        self.given_peak = self.whole_given_peak = self._now - sum(self._seeds.values())

    @contextmanager
    def setting_aside(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, gradients of these are forgotten when they have been accumulated."""
        trained = [p for p in parameters if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(self._set_aside) for p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _set_aside(self, parameter: torch.Tensor) -> None:
        for storage in storages(parameter.grad):
            self._aside += self._forget(storage)

    def _born(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        super()._born(storage, dtype)
        own = self._now - sum(self._seeds.values())
        self.whole_peak = max(self.whole_peak, self._now + self._aside)
        self.given_peak = max(self.given_peak, own)
        self.whole_given_peak = max(self.whole_given_peak, own + self._aside)

    def _forget(self, storage: torch.UntypedStorage) -> int:
        size = super()._forget(storage)
        self._seeds.pop(storage._cdata, None)
        return size

    def _gone(self, key: int, size: int) -> None:
        super()._gone(key, size)
        self._seeds.pop(key, None)
