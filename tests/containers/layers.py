"""Layers that take any container: most change one leaf of it, some the container."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gpipe import is_recomputing
from gpipe.skip import Namespace, pop, skippable, stash

from ..strategies import Named, Residual
from .functions import FUNCTIONS, Once
from .values import CONTAINERS, MADE, complexes, floats, packed, tensors, with_leaf


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


Kind = Callable[[Site], nn.Module | list[nn.Module] | None]
"""Makes a layer, or several in a row, or None where none of this kind can stand."""


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


def _if_positive(x: Tensor) -> Tensor | None:
    return x.cos() if float(x.detach().sum()) > 0 else None


def container_of(option: int) -> str:
    return list(CONTAINERS)[option % len(CONTAINERS)]


def _repacked(site: Site, change: Callable[[list[Any]], list[Any]]) -> nn.Module:
    return Repack(container_of(site.option), change)


def _adding(make: Callable[[Tensor], Any]) -> Kind:
    def kind(site: Site) -> nn.Module | None:
        place = site.place(floats(site.value))
        return None if place is None else _repacked(site, lambda leaves: [*leaves, make(leaves[place])])

    return kind


def _dropping(site: Site) -> nn.Module | None:
    """But never the last leaf that layers can compute with."""
    place, kept = site.place(tensors(site.value)), floats(site.value)
    if place is None or kept in ([], [place]):
        return None
    return _repacked(site, lambda leaves: leaves[:place] + leaves[place + 1 :])


def _rotated(site: Site) -> nn.Module:
    return _repacked(site, lambda leaves: [*leaves[1:], leaves[0]])


def _on(make: Callable[[Tensor, Site], nn.Module]) -> Kind:
    def kind(site: Site) -> nn.Module | None:
        place = site.place(floats(site.value))
        return None if place is None else On(place, make(site.leaf(place), site))

    return kind


def _function(name: str, function: Callable[[Tensor], Tensor]) -> Kind:
    return _on(lambda like, site: Named(name, function))


def _on_complex(site: Site) -> nn.Module | None:
    place = site.place(complexes(site.value))
    if place is None:
        return None
    like = site.leaf(place)
    functions = {"real": lambda z: z.real, "square": lambda z: z * z.conj(), "conjugate": Tensor.conj}
    layers = [Scale(like), _linear(like), *(Named(name, function) for name, function in functions.items())]
    return On(place, layers[site.option % len(layers)])


def _merging(combine: Callable[[Tensor, Tensor], Tensor]) -> Kind:
    """Two leaves become one, in the place of the first."""

    def kind(site: Site) -> nn.Module | None:
        places = floats(site.value)
        if len(places) < 2:
            return None
        a, b = places[site.pick % len(places)], places[(site.pick + 1) % len(places)]
        return Named(f"merge {a} {b}", lambda value: _merged(value, a, b, combine))

    return kind


def _merged(value: Any, a: int, b: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Any:
    leaves = pytree.tree_leaves(value)
    other = leaves[b].flatten(1).sum(1).to(leaves[a].dtype)
    return with_leaf(value, a, combine(leaves[a], other.reshape(-1, *[1] * (leaves[a].dim() - 1))))


def _there_and_back(there: Callable[[Tensor], Any], back: Callable[[Tensor, Any], Tensor]) -> Kind:
    """Two layers: one adds something to the container that only the other understands."""

    def kind(site: Site) -> list[nn.Module] | None:
        place = site.place(floats(site.value))
        if place is None:
            return None

        def added(value: Any) -> Any:
            return {"value": value, "more": (2, there(pytree.tree_leaves(value)[place]))}

        def taken(value: Any) -> Any:
            inner, (two, more) = value["value"], value["more"]
            return with_leaf(inner, place, two * back(pytree.tree_leaves(inner)[place], more))

        return [Named("add", added), Named("take", taken)]

    return kind


def _giving(site: Site) -> nn.Module | None:
    place = site.place(floats(site.value))
    return None if place is None else Gives(place, site.leaf(place), container_of(site.option))


def _linear(like: Tensor, columns: int | None = None) -> nn.Linear:
    width = like.shape[-1]
    return nn.Linear(width, columns or width, dtype=like.dtype)


def _hooked(like: Tensor, site: Site) -> nn.Module:
    """Hooks of modules and of parameters, which count (that gives None), and some of which change what they see."""
    layer, count = _linear(like), site.tally.count
    if site.option % 4 == 0:
        layer.register_forward_pre_hook(lambda *_: count(f"{site.name}: before"))
        layer.register_forward_hook(lambda *arguments: count(f"{site.name}: after") or arguments[2] * 2)
    if site.option % 4 == 1:
        layer.register_full_backward_hook(lambda *_: count(f"{site.name}: backward"))
    if site.option % 4 == 2:
        layer.weight.register_hook(lambda g: count(f"{site.name}: gradient") or g.clamp(-0.1, 0.1))
    if site.option % 4 == 3:
        layer.weight.register_post_accumulate_grad_hook(lambda p: count(f"{site.name}: whole") or _clamp(p))
    return layer


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-1, 1)


def hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _frozen(like: Tensor, site: Site) -> nn.Module:
    layer = _linear(like)
    (layer if site.option % 2 else layer.weight).requires_grad_(False)
    return layer


def _stash(site: Site) -> nn.Module:
    site.open.append(Namespace())
    return Stash(site.place([None, *tensors(site.value)])).isolate(site.open[-1])


def _pop(site: Site) -> nn.Module | None:
    if not site.open:
        return None
    return Pop(container_of(site.option)).isolate(site.open.pop(site.pick % len(site.open)))


def fresh(x: Tensor) -> Tensor:
    """Memory of its own, which nobody needs as it is."""
    return x * 0.9


def _zero_column(x: Tensor) -> Tensor:
    x[..., 0] = 0
    return x


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "multiply": lambda x: x.mul_(0.9),
    "relu": lambda x: x.relu_(),
    "column": _zero_column,
    "part": lambda x: (x[..., :1].add_(1), x)[1],
}


def _in_place(like: Tensor, site: Site) -> nn.Module:
    name = list(IN_PLACE)[site.option % len(IN_PLACE)]
    return Named(f"{name} in place", IN_PLACE[name])


def _in_place_on_fresh(like: Tensor, site: Site) -> nn.Module:
    return nn.Sequential(Named("fresh", fresh), _in_place(like, site))


STRUCTURE: dict[str, Kind] = {
    "pack": lambda site: _repacked(site, lambda leaves: leaves),
    "rotate": _rotated,
    "drop": _dropping,
    **{f"add {name}": _adding(make) for name, make in MADE.items()},
}
"""Which only change what is where."""

BY_ROW: dict[str, Kind] = {
    "linear": _on(lambda like, site: _linear(like, 1 + site.option % 4)),
    "scale": _on(lambda like, site: Scale(like)),
    "residual": _on(lambda like, site: Residual(_linear(like))),
    "frozen": _on(_frozen),
    "tanh": _function("tanh", torch.tanh),
    "fresh": _function("fresh", fresh),
    "detach": _function("detach", Tensor.detach),
    "in place": _on(_in_place),
    "in place on fresh": _on(_in_place_on_fresh),
    "complex": _on_complex,
    "merge": _merging(lambda a, b: a + b),
    "product": _merging(lambda a, b: a * b.sin()),
    "merge in place": _merging(lambda a, b: fresh(a).add_(b)),
    **{name: _function(name, function) for name, function in FUNCTIONS.items()},
    "function with parameter": _on(lambda like, site: Applied(like)),
    # To make a tensor require grad makes its views do so too, which a pipe cannot know of those on another way.
    "force": _on(lambda like, site: Force(_linear(like), at_input=site.alone and site.option % 2 == 0)),
    "lookup": _on(lambda like, site: Lookup(like, [None, None, 0.5][site.option % 3])),
    "tied": _on(lambda like, site: Tied(_linear(like), _linear(like))),
    "checkpointed": _on(lambda like, site: Checkpointed(_linear(like), reentrant=site.option % 2 == 0)),
    "unwatched": _on(lambda like, site: Unwatched(_linear(like))),
    "constants": _there_and_back(lambda x: "text", lambda x, text: x + len(text)),
    "sparse": _there_and_back(Tensor.to_sparse, lambda x, sparse: x + sparse.to_dense().sin()),
    "gives weight": _giving,
    "stash": _stash,
    "pop": _pop,
}
"""Which treat each row by itself."""

BY_MICROBATCH: dict[str, Kind] = {
    "hooked": _on(_hooked),
    "watches": _on(lambda like, site: Watches(site)),
    "sometimes": _there_and_back(_if_positive, lambda x, more: x if more is None else x + more),
    "either": _on(lambda like, site: Either(like)),
    "learns": _on(lambda like, site: Learns(like)),
}
"""Which compute, or count, something else for each micro-batch."""

KINDS = STRUCTURE | BY_ROW | BY_MICROBATCH
