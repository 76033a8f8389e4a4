"""Residual blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch import Tensor, nn

from ..skip import Namespace, pop, skippable, stash

Join = Callable[[Tensor, Tensor], Tensor]
_RESERVED = ("shortcut", "join")


class Residual(nn.Module):
    """A residual block: ``layers(x) + shortcut(x)``.

    In a pipe it is one layer. :func:`gpipe.nn.flatten_nested` replaces it by its layers, which may be in different
    partitions.

    Args:
        layers: modules, or one ``OrderedDict`` of them, as for ``nn.Sequential``; each takes and returns one tensor.
        shortcut: a module that is applied to the input, such as a convolution that changes its shape. By default the
            input is used unchanged.
        join: a function or module that combines the output of the layers and the output of the shortcut. By default it
            adds them; a U-Net concatenates.

    Raises:
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
        for name, layer in nn.Sequential(*layers).named_children():
            if name in _RESERVED:
                raise ValueError(f"no layer of a Residual may be called {name!r}; pass it as {name}=, or rename it")
            self.add_module(name, layer)
        self.shortcut = shortcut
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers and the shortcut, and join their outputs.

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
        """Iterate over the layers with their names."""
        return ((name, layer) for name, layer in self._modules.items() if layer is not None and name not in _RESERVED)


@skippable(stash=["input"])
class Fork(nn.Module):
    """The first layer of a residual block, which stashes the input."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class JoinAgain(nn.Module):
    """The last layer of a residual block, which pops the input and joins it with the output."""

    def __init__(self, shortcut: nn.Module | None, join: Join) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.join = join

    def forward(self, y: Tensor) -> Generator[pop, Tensor, Tensor]:
        x = yield pop("input")
        return self.join(y, x if self.shortcut is None else self.shortcut(x))


def ends(block: Residual) -> tuple[nn.Module, nn.Module]:
    """Return the first and the last layer of ``block`` in a sequence of layers."""
    # Nested blocks stash under the same name, so each pair needs its own namespace.
    namespace = Namespace()
    both: list[Any] = [Fork(), JoinAgain(block.shortcut, block.join)]
    for end in both:
        end.training = block.training
        end.isolate(namespace)
    return both[0], both[1]
