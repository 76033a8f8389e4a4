"""Replace layers that cannot run on fake tensors, such as layers with packed weights, by stubs.

The layer itself is called once on zeros on the CPU. In a fake copy of the model, the outputs, gradients and saved
tensors of its stub have the sizes measured in this call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from microbatch import flatten, unflatten
from streams import add_note, waiting

from ._allocations import AllocationTracker
from ._ends import enter
from ._forms import compute_form
from ._storages import storages
from .memory import held_bytes, is_plain
from .sandbox import copied

Known = dict[Any, "_Seen"]
"""The measured calls of a model's layers, keyed by the form of the layer and the form of its arguments."""


def opaque(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules that have real parameters or buffers of a tensor subclass."""
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        is_leaf = not any(True for child in module.children() for _ in child.parameters())
        if is_leaf and not all(map(is_plain, own)) and not any(tensor.is_meta for tensor in own):
            yield module


def stand_in(made: nn.Module, layer: nn.Module, known: Known) -> None:
    """Let ``made``, a fake copy of ``layer``, return outputs like ``layer`` and hold the same number of bytes."""
    own = [*made.parameters(recurse=False), *made.buffers(recurse=False)]
    beside = held_bytes(_tensors(layer)) - held_bytes(own)
    if own and beside > 0:
        # Not a buffer, since a recomputation may store copies of buffers.
        made._attached = nn.Parameter(own[0].new_zeros(beside, dtype=torch.uint8), requires_grad=False)
    # Set on the instance, since a wrapper may check the class of the layer.
    made.forward = partial(_forward, made, layer, known)


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def _forward(made: nn.Module, layer: nn.Module, known: Known, *args: Any, **kwargs: Any) -> Any:
    leaves, tree = flatten((args, kwargs))
    inputs, trained = tensors_in(leaves), list_trained(made)
    situation = [_form(leaf) for leaf in leaves], torch.is_grad_enabled(), _autocast()
    key = compute_form(layer) or id(layer), compute_form((situation, tree)) or repr(situation)
    if key not in known:
        known[key] = _seen(layer, leaves, tree)
    seen = known[key]
    one = next(iter([*made.parameters(), *made.buffers()]))
    outputs: Any = _StandIn.apply(seen, one, *inputs, *trained)  # type: ignore[no-untyped-call]
    rest = iter(outputs)
    return unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in seen.outputs], seen.tree)


class _Seen(NamedTuple):
    """The measurements of a call. Tensors are on ``meta``.

    Attributes:
        outputs: the leaves of the output.
        tree: the structure of the output.
        kept: how the graph stores each input and output tensor.
        saved: the additional bytes that the graph stores, as saved tensors and in attributes.
        gradients: the gradients of the input tensors and of the trained parameters; None for a missing gradient.
        temporary: peak bytes of the forward and of the backward, beyond the bytes that remain after it.
        flops: floating-point operations of the forward and of the backward.
    """

    outputs: Sequence[Any]
    tree: Any
    kept: Sequence[_How]
    saved: tuple[int, int]
    gradients: Sequence[Tensor | None]
    temporary: tuple[int, int]
    flops: tuple[int, int]


class _How(Enum):
    """How a graph stores a tensor. Saved tensors can be freed and recomputed; tensors in attributes cannot."""

    NOT, SAVED, ATTRIBUTE = range(3)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: _Seen, one: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        _spend(one, seen.temporary[0] + sum(seen.saved), seen.flops[0])
        shapes = tensors_in(seen.outputs)
        outputs = [_like(shape, one) for shape in shapes]
        ctx.mark_non_differentiable(*(y for y, shape in zip(outputs, shapes, strict=True) if not shape.requires_grad))
        ends = [*inputs[: len(seen.kept) - len(outputs)], *outputs]
        saved, attributes = ([_bytes(one, size)] for size in seen.saved)
        for how, tensor in zip(seen.kept, ends, strict=True):
            if how is not _How.NOT:
                (saved if how is _How.SAVED else attributes).append(tensor.detach())
        ctx.seen, ctx.one, ctx.attributes = seen, one, attributes
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        seen, one = ctx.seen, ctx.one
        _spend(one, seen.temporary[1], seen.flops[1])
        ctx.attributes = None
        return None, None, *(None if each is None else _like(each, one) for each in seen.gradients)


def _like(shape: Tensor, one: Tensor) -> Tensor:
    return one.new_empty_strided(shape.shape, shape.stride(), dtype=shape.dtype).zero_()


def _bytes(one: Tensor, size: int) -> Tensor | None:
    return one.new_empty(size, dtype=torch.uint8) if size else None


def _spend(one: Tensor, size: int, flops: int) -> None:
    """Allocate and free ``size`` bytes, and run a fake operation that FLOP counters count as ``flops``."""
    _bytes(one, size)
    if flops > 1:
        row = torch.ones((), device="meta").expand(1, flops // 2)
        torch.mm(row, row.t())


def _seen(layer: nn.Module, leaves: Sequence[Any], tree: Any) -> _Seen:
    """Call a copy of ``layer`` on zeros, in a separate thread, where none of the caller's modes is active."""
    found: list[_Seen | Exception] = []
    is_enabled, kind = _autocast()

    def call() -> None:
        try:
            with torch.autocast("cpu", kind, is_enabled), torch.set_grad_enabled(grad_mode):
                found.append(_run_layer(copied(layer).train(), leaves, tree))
        except Exception as error:
            found.append(error)

    grad_mode = torch.is_grad_enabled()
    thread = waiting.Thread(target=call, name="profiler: a layer on zeros")
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        add_note(
            found[0], f"{type(layer).__name__} was called on zeros on the CPU, since it cannot run on fake tensors"
        )
        raise found[0]
    return found[0]


def _run_layer(layer: nn.Module, leaves: Sequence[Any], tree: Any) -> _Seen:
    args, kwargs = unflatten(_zeros(leaves), tree)
    layer(*args, **kwargs)  # the first call may initialize state
    given = [enter(leaf, copies=True) if isinstance(leaf, Tensor) else leaf for leaf in _zeros(leaves)]
    (args, kwargs), forward, packed = unflatten(given, tree), AllocationTracker(), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        # An output that refers to its own graph would never be freed.
        packed.append(tensor if tensor.grad_fn is None else tensor.detach())
        return packed[-1]

    with forward, saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(*args, **kwargs)
    returned, form = flatten(output)
    ends = [*tensors_in(given), *tensors_in(returned)]
    attributes = forward.alive(without=[*ends, *packed])
    saved = forward.alive(without=ends) - attributes
    needed = forward.peak - forward.alive()
    sources = [*tensors_in(given), *list_trained(layer)]
    roots = [each for each in tensors_in(returned) if each.requires_grad]
    gradients, spent, flops = _backward(roots, sources)
    shapes = [_shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in returned]
    graph, watched = [root.grad_fn for root in roots], [weakref.ref(each.untyped_storage()) for each in ends]
    by_hook = {storage._cdata for storage in storages(packed)}
    is_packed = [each.untyped_storage()._cdata in by_hook for each in ends]
    del args, kwargs, given, output, returned, ends, sources, roots, packed[:]
    there = [bool(graph) and ref() is not None for ref in watched]
    ways = [_How.SAVED if way else _How.ATTRIBUTE for way in is_packed]
    kept = [way if is_there else _How.NOT for way, is_there in zip(ways, there, strict=True)]
    return _Seen(shapes, form, kept, (saved, attributes), gradients, (needed, spent), (forward.flops, flops))


def _backward(roots: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[list[Tensor | None], int, int]:
    """Return the gradients on ``meta``, the peak bytes beyond them, and the FLOPs. Retain the graph."""
    found = dict[int, Tensor | None]()
    wanted = [each for each in sources if each.requires_grad] if roots else []
    with AllocationTracker() as tracker:
        ones = list(map(torch.zeros_like, roots))
        made = torch.autograd.grad(roots, wanted, ones, allow_unused=True, retain_graph=True) if wanted else ()
        del ones
    found = {id(each): None if one is None else _shape(one) for each, one in zip(wanted, made, strict=True)}
    return [found.get(id(each)) for each in sources], tracker.peak - tracker.alive(), tracker.flops


def list_trained(layer: nn.Module) -> list[nn.Parameter]:
    return [each for each in layer.parameters() if each.requires_grad]


def tensors_in(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _shape(tensor: Tensor) -> Tensor:
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return found.requires_grad_(tensor.requires_grad)


def _zeros(leaves: Iterable[Any]) -> list[Any]:
    def zeros(leaf: Tensor) -> Tensor:
        found = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
        return found.requires_grad_(leaf.requires_grad)

    return [zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
