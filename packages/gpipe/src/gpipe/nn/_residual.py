"""Layers with a way around them."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch import Tensor, nn

from ..skip import Namespace, pop, skippable, stash

Join = Callable[[Tensor, Tensor], Tensor]
_RESERVED = ("shortcut", "join")


class Residual(nn.Module):
    """Layers in a row, to whose result their input is added: ``layers(x) + shortcut(x)``.

    In a pipe it is one layer. :func:`gpipe.nn.flatten_nested` makes several of it, which may be in different
    partitions; the input then goes straight to the partition that needs it again.

    Args:
        layers: modules, or one ``OrderedDict`` of them, as for ``nn.Sequential``; each takes and returns one tensor.
        shortcut: what becomes of the input before it is added, such as a convolution that changes its shape. By
            default nothing.
        join: makes the result of both. By default they are added; the skip of a U-Net concatenates. A module's
            parameters are trained too.

    Raises:
        TypeError: ``shortcut`` is no module, or ``join`` cannot be called.
        ValueError: a layer is called ``"shortcut"`` or ``"join"``.

    >>> import torch
    >>> Residual(nn.Identity(), nn.Flatten())(torch.ones(2, 3))
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    >>> Residual(nn.Identity(), join=lambda y, x: torch.cat([y, x], dim=1))(torch.ones(2, 3)).shape
    torch.Size([2, 6])
    """

    def __init__(self, *layers: Any, shortcut: nn.Module | None = None, join: Join = operator.add) -> None:
        super().__init__()
        if shortcut is not None and not isinstance(shortcut, nn.Module):
            raise TypeError(f"shortcut must be a module or None; got {type(shortcut).__name__}")
        if not callable(join):
            raise TypeError(f"join must be a function of two tensors, or a module; got {type(join).__name__}")
        for name, layer in nn.Sequential(*layers).named_children():
            if name in _RESERVED:
                raise ValueError(f"no layer of a Residual may be called {name!r}; give it as {name}=, or rename it")
            self.add_module(name, layer)
        self.shortcut = shortcut
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        """What ``join`` makes of the layers' output and the shortcut's.

        Args:
            x: a tensor.

        Returns:
            A tensor.
        """
        y = x
        for _, layer in self.body():
            y = layer(y)
        other: Tensor = x if self.shortcut is None else self.shortcut(x)
        return self.join(y, other)

    def body(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers with their names."""
        return ((name, layer) for name, layer in self._modules.items() if layer is not None and name not in _RESERVED)


@skippable(stash=["input"])
class Fork(nn.Module):
    """Where a residual block begins."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class JoinAgain(nn.Module):
    """Where a residual block ends. Its modules are called as in the block."""

    def __init__(self, shortcut: nn.Module | None, join: Join) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.join = join

    def forward(self, y: Tensor) -> Generator[pop, Tensor, Tensor]:
        x = yield pop("input")
        return self.join(y, x if self.shortcut is None else self.shortcut(x))


def ends(block: Residual) -> tuple[nn.Module, nn.Module]:
    """What stands before and after the layers of ``block`` when they are layers of a pipe."""
    namespace = Namespace()
    both: list[Any] = [Fork(), JoinAgain(block.shortcut, block.join)]
    for end in both:
        end.training = block.training
        end.isolate(namespace)
    return both[0], both[1]


def residual(*layers: Any, shortcut: nn.Module | None = None, join: Join = operator.add) -> nn.Sequential:
    """The layers of a :class:`Residual` for an ``nn.Sequential`` that is written by hand.

    Args:
        layers: modules, or one ``OrderedDict`` of them.
        shortcut: what becomes of the input before it is added.
        join: makes the result of both.

    Returns:
        One layer that stashes the input, ``layers``, and one that pops it and joins; between any two a pipe may be cut.

    Raises:
        TypeError, ValueError: as :class:`Residual`.

    >>> model = nn.Sequential(nn.Linear(2, 4), *residual(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))
    >>> len(model)
    6
    """
    block = Residual(*layers, shortcut=shortcut, join=join)
    fork, end = ends(block)
    return nn.Sequential(OrderedDict([("fork", fork), *block.body(), ("join", end)]))
