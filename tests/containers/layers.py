"""Layers as people write them: of one leaf, or of the whole container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gpipe.skip import pop, skippable, stash

from .functions import Once
from .sites import Site
from .values import packed, with_leaf


class Named(nn.Module):
    """A layer that is a function, with a name to be shown in failures."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = name
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)

    def extra_repr(self) -> str:
        return self.name


class Residual(nn.Module):
    """A layer and a way around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class On(nn.Module):
    """A layer for one leaf."""

    def __init__(self, place: int, inner: nn.Module) -> None:
        super().__init__()
        self.place = place
        self.inner = inner

    def forward(self, value: Any) -> Any:
        return with_leaf(value, self.place, self.inner(pytree.tree_leaves(value)[self.place]))


class Repack(nn.Module):
    """The same leaves in another container, some more, fewer, or in another order."""

    def __init__(self, container: str, change: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__()
        self.container = container
        self.change = change

    def forward(self, value: Any) -> Any:
        return packed(self.container, self.change(pytree.tree_leaves(value)))

    def extra_repr(self) -> str:
        return self.container


class Scale(nn.Module):
    """A parameter for each column."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(like.shape[-1], dtype=like.dtype) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Force(nn.Module):
    """The derivative of an energy by the input, as models of atoms compute it."""

    def __init__(self, inner: nn.Module, at_input: bool) -> None:
        super().__init__()
        self.inner = inner
        self.at_input = at_input

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.requires_grad_() if self.at_input else x.detach().requires_grad_()
            energy = self.inner(at).sin().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return at + force if self.at_input else x + force


class Lookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, like: Tensor, max_norm: float | None) -> None:
        super().__init__()
        self.inner = nn.Embedding(5, like.shape[-1], sparse=True, max_norm=max_norm, dtype=like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner((x.detach() * 3).long().abs()[..., 0] % 5)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        second.weight = first.weight
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Either(nn.Module):
    """Uses one of two parameters, as the micro-batch has it; never the third."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.positive, self.negative, self.never = Scale(like), Scale(like), Scale(like)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if float(x.detach().sum()) > 0 else self.negative(x)


class Learns(nn.Module):
    """Updates buffers that its output depends on: one in place, one by putting another in its place."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=like.dtype))
        self.register_buffer("mean", torch.zeros(like.shape[-1], dtype=like.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        return x + 0.1 * self.mean / (1 + self.calls)


class Checkpointed(nn.Module):
    """Computes its inner layer again in the backward, by itself."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant, preserve_rng_state=False)


class Unwatched(nn.Module):
    """Computes a part without gradients."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aside = self.inner(x)
        return x + aside


class Watches(nn.Module):
    """Has a hook on its own tensor, which counts and halves the gradient, and perhaps one on what it is given."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.tally = site.tally
        self.name = site.name
        # Else a hook on it would see the sum of the gradients of both ways in the plain model, its own part in a pipe.
        self.given = site.alone

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        for tensor in (x, y) if self.given else (y,):
            if tensor.requires_grad:
                tensor.register_hook(self._halve)
        return x * y

    def _halve(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of a function that returns None
            return None
        self.tally.count(f"{self.name}: tensor")
        return gradient * 0.5


class Applied(nn.Module):
    """A custom function with a parameter, which can be differentiated once."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.weight = Scale(like).weight

    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x, self.weight)


class Gives(nn.Module):
    """Adds its own weight to the container."""

    def __init__(self, place: int, like: Tensor, container: str) -> None:
        super().__init__()
        self.weight = Scale(like).weight
        self.place = place
        self.container = container

    def forward(self, value: Any) -> Any:
        leaves = pytree.tree_leaves(value)
        return packed(self.container, [*leaves, self.weight.expand(len(leaves[self.place]), -1)])


@skippable(stash=["leaf"])
class Stash(nn.Module):
    def __init__(self, place: int | None) -> None:
        super().__init__()
        self.place = place

    def forward(self, value: Any) -> Any:
        leaf = None if self.place is None else pytree.tree_leaves(value)[self.place]
        yield stash("leaf", leaf)
        return value


@skippable(pop=["leaf"])
class Pop(nn.Module):
    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container

    def forward(self, value: Any) -> Any:
        leaf = yield pop("leaf")
        return packed(self.container, [*pytree.tree_leaves(value), leaf])
