"""Pass tensors that skip layers to a layer that runs alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import nn

from ._ends import enter


class SkipStore(dict[Hashable, "torch.Tensor | None"]):
    """Tensors that earlier layers have stashed and no layer has popped yet.

    >>> store = SkipStore()
    >>> store["input"] = torch.ones(2)
    >>> store.pop("input")
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        super().__init__()
        self._stashed: list[Hashable] = []

    def __setitem__(self, key: Hashable, value: torch.Tensor | None) -> None:
        self._stashed.append(key)
        super().__setitem__(key, value)

    def pop(self, key: Hashable) -> torch.Tensor | None:  # type: ignore[override]
        """The tensor of `key`, as an input of the current layer: detached, unless this layer has stashed it itself.

        Args:
            key: the key of the skip.

        Returns:
            The tensor; None if None was stashed.
        """
        value = super().pop(key)
        return value if value is None or key in self._stashed else enter(value)

    def stashed(self) -> list[torch.Tensor]:
        """Tensors that the current layer has stashed and not popped itself: further outputs of it."""
        values = [self[key] for key in self._stashed if key in self]
        return [value for value in values if value is not None]

    def detach(self) -> None:
        """Detaches the stashed tensors from the layer that made them. Call it before the next layer."""
        for key in self._stashed:
            value = self.get(key)
            if value is not None:
                super().__setitem__(key, value.detach().requires_grad_(value.requires_grad))
        self._stashed.clear()


class SkipLayer(Protocol):
    """A layer that passes tensors directly to later layers, or takes them. It is recognized by its method."""

    def route_skips(self, store: SkipStore) -> AbstractContextManager[object]:
        """A context in which the forward of this layer stashes by ``store[key] = tensor``, and pops by ``store.pop``.

        Args:
            store: what earlier layers have stashed.

        Returns:
            A context manager.
        """


Route = Callable[[SkipStore], AbstractContextManager[object]]


def routes_of(layer: nn.Module) -> list[Route]:
    """The method of each :class:`SkipLayer` in `layer`."""
    found = (getattr(child, "route_skips", None) for child in layer.modules())
    return [route for route in found if route is not None]


@contextmanager
def routed(layer: nn.Module, store: SkipStore) -> Iterator[None]:
    with ExitStack() as stack:
        for route in routes_of(layer):
            stack.enter_context(route(store))
        yield
