"""Route skip tensors to a layer that runs in isolation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import nn

from ._ends import enter


class SkipStore(dict[Hashable, "torch.Tensor | None"]):
    """The tensors that earlier layers stashed and no layer has popped yet.

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
        """Remove and return a tensor, detached unless the current layer stashed it.

        Args:
            key: the key of the skip.

        Returns:
            The tensor; None if None was stashed.

        Raises:
            KeyError: nothing is stashed under `key`.
        """
        value = super().pop(key)
        return value if value is None or key in self._stashed else enter(value)

    def stashed(self) -> list[torch.Tensor]:
        """Return the tensors that the current layer stashed and did not pop, which are additional outputs."""
        values = [self[key] for key in self._stashed if key in self]
        return [value for value in values if value is not None]

    def detach(self) -> None:
        """Detach the tensors that the current layer stashed. Call this method before the next layer."""
        for key in self._stashed:
            value = self.get(key)
            if value is not None:
                super().__setitem__(key, value.detach().requires_grad_(value.requires_grad))
        self._stashed.clear()


class SkipLayer(Protocol):
    """A layer that stashes tensors for later layers, or pops them. The profiler recognizes it by its method."""

    def route_skips(self, store: SkipStore) -> AbstractContextManager[object]:
        """Make the forward of this layer stash with ``store[key] = tensor`` and pop with ``store.pop(key)``.

        Args:
            store: the tensors that earlier layers stashed.

        Returns:
            A context manager that the forward runs in.
        """


Route = Callable[[SkipStore], AbstractContextManager[object]]


def find_routes(layer: nn.Module) -> list[Route]:
    """Return the method of each :class:`SkipLayer` in `layer`."""
    found = (getattr(child, "route_skips", None) for child in layer.modules())
    return [route for route in found if route is not None]


@contextmanager
def routed(layer: nn.Module, store: SkipStore) -> Iterator[None]:
    with ExitStack() as stack:
        for route in find_routes(layer):
            stack.enter_context(route(store))
        yield
