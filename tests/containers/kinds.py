"""Kinds of layers: each makes one for where it is to stand, if it can stand there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe.skip import Namespace

from .functions import FUNCTIONS
from .layers import (
    Applied,
    Checkpointed,
    Either,
    Force,
    Gives,
    Learns,
    Lookup,
    Named,
    On,
    Pop,
    Repack,
    Residual,
    Scale,
    Stash,
    Tied,
    Unwatched,
    Watches,
)
from .sites import Site
from .values import CONTAINERS, MADE, complexes, floats, tensors, with_leaf

Kind = Callable[[Site], nn.Module | list[nn.Module] | None]
"""Makes a layer, or several in a row, or None where none of this kind can stand."""


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


def _if_positive_in_place(x: Tensor) -> Tensor:
    return x.mul_(0.9) if float(x.detach().sum()) > 0 else x


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
    "sometimes in place": _function("sometimes in place", _if_positive_in_place),
    "either": _on(lambda like, site: Either(like)),
    "learns": _on(lambda like, site: Learns(like)),
}
"""Which compute, or count, something else for each micro-batch."""

KINDS = STRUCTURE | BY_ROW | BY_MICROBATCH
