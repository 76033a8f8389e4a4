"""Counts a backward twice: with new gradients of parameters, and with gradients that are added to earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ._allocations import AllocationTracker
from ._storages import storages


class GradientTracker(AllocationTracker):  # type: ignore[no-untyped-call]
    """Forgets the gradients of parameters as soon as they are accumulated.

    So ``peak`` is that of a backward that adds to gradients which are there.

    Attributes:
        whole_peak: the same with gradients that stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole_peak = 0
        self._aside = 0

    def restart(self) -> int:
        """The peak so far; from now on it is that of what comes."""
        peak, self.peak = self.peak, self.alive()
        self.whole_peak = self.peak
        return peak

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
        self.whole_peak = max(self.whole_peak, self._now + self._aside)
