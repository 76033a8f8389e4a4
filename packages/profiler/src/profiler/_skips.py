"""How tensors that skip layers reach a layer that runs alone.

A layer takes part by having a method ``route_skips(store)`` that returns a context manager. Inside it the layer puts
what it stashes into ``store[key]`` and takes what it pops by ``store.pop(key)``, instead of wherever it usually does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from ._data import SkipProfile
from ._enter import enter
from ._storages import tensor_bytes

Route = Callable[["SkipStore"], AbstractContextManager[object]]


class SkipStore(dict[Hashable, "torch.Tensor | None"]):
    """What earlier layers stashed and no later layer has popped yet.

    Attributes:
        arrived: the tensors that another layer has popped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[SkipProfile] = []
        self._stashed: list[Hashable] = []
        self._sources: dict[Hashable, int] = {}
        self._layer = 0

    def __setitem__(self, key: Hashable, value: torch.Tensor | None) -> None:
        self._stashed.append(key)
        self._sources[key] = self._layer
        super().__setitem__(key, value)

    def pop(self, key: Hashable) -> torch.Tensor | None:  # type: ignore[override]
        """Hands `key` over as an input, cut off from the layer that stashed it, unless that is the same layer.

        Args:
            key: of the skip.

        Returns:
            What was stashed, detached unless this layer stashed it; None if None was.
        """
        value = super().pop(key)
        if value is None or key in self._stashed:
            return value
        self.arrived.append(SkipProfile(self._sources[key], self._layer, tensor_bytes(value)))
        return enter(value)

    def stashed(self) -> list[torch.Tensor]:
        """What the current layer has stashed and not popped itself: outputs of it, beside the ordinary ones."""
        values = [self[key] for key in self._stashed if key in self]
        return [value for value in values if value is not None]

    def detach(self) -> None:
        """Makes the stashed tensors independent of the layer that made them, and starts the next layer."""
        for key in self._stashed:
            value = self.get(key)
            if value is not None:
                super().__setitem__(key, value.detach().requires_grad_(value.requires_grad))
        self._stashed.clear()
        self._layer += 1


@contextmanager
def routed(layer: nn.Module, store: SkipStore) -> Iterator[None]:
    """Every module inside `layer` that can route its skips uses `store`."""
    with ExitStack() as stack:
        for child in layer.modules():
            route: Route | None = getattr(child, "route_skips", None)
            if route is not None:
                stack.enter_context(route(store))
        yield
