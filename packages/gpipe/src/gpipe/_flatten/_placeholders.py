"""Placeholders for tensors of other segments."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from microbatch import map_tensors

from .._current import current
from .._torch import no_torch_dispatch, no_torch_function
from ..values._leaves import storage_id, tensors_of
from ._calls import WITH_SAMPLE, Like
from ._sources import looks_at_shapes
from ._watch import SIZES, VALUES


def placeholder(tensor: Tensor) -> Tensor:
    """``tensor`` as the placeholder of one that belongs to another segment."""
    return Placeholder.of(tensor, [False])


def is_placeholder(tensor: Tensor) -> bool:
    return hasattr(tensor, "stands_in")


def unknown(leaf: Any, device: torch.device, *, writable: bool = True) -> Any:
    """A placeholder for a tensor, filled with NaN; any other object is returned as it is.

    It takes no memory unless it is ``writable``.
    """
    if not isinstance(leaf, Like):
        return leaf
    value = math.nan if leaf.dtype.is_floating_point or leaf.dtype.is_complex else 0
    size = leaf.shape if writable else ()
    return placeholder(torch.full(size, value, dtype=leaf.dtype, device=device).expand(leaf.shape))


class Placeholder(Tensor):
    """A tensor of another segment. What is computed of its values is one too, and no block may be called with it.

    Attributes:
        is_known: whether the memory was given its values, in a list that all views of it share.
    """

    is_known: list[bool]
    stands_in: bool

    @classmethod
    def of(cls, plain: Tensor, is_known: list[bool]) -> Tensor:
        found: Any = plain
        if type(plain) is Tensor:  # fake ones, by which profiles are made without a device, cannot be of another class
            found = plain.as_subclass(cls)
            found.is_known = is_known
        if not is_known[0]:
            found.stands_in = True  # copies of it have this too
        return found  # type: ignore[no-any-return]

    def plain(self) -> Tensor:
        """The same memory, as a tensor of no class."""
        with no_torch_function(), no_torch_dispatch():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found = memo[id(self)] = self.of(copy.deepcopy(self.plain(), memo), list(self.is_known))
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUES and current.work.tape is not None:
            _expect_known(args[0], "the forward")
        kwargs = kwargs or {}
        with no_torch_function():
            if not _is_known((args, kwargs)):
                # Without a graph: where the result gets its values, zeros would flow back to it, and become NaN there.
                args, kwargs = _pytree.tree_map_only(Tensor, _without_graph, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        used = [each for each in tensors_of((args, kwargs)) if isinstance(each, cls)]
        if torch.Tag.data_dependent_output in func.tags and current.work.tape is not None:
            _expect_known(args, "the forward")
        args, kwargs = _pytree.tree_map_only(cls, lambda each: each.plain(), (args, kwargs or {}))
        result = func(*args, **kwargs)
        views = {storage_id(each): each.is_known for each in used}
        is_made = not all(each.is_known[0] for each in used) and not looks_at_shapes(func)

        def marked(tensor: Tensor) -> Tensor:
            is_known = views.get(storage_id(tensor), [False] if is_made else None)
            return tensor if is_known is None else cls.of(tensor, is_known)

        return _pytree.tree_map_only(Tensor, marked, result)


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def computed(value: Any, user: str) -> Any:
    """``value`` with plain tensors for placeholders that were given values; RuntimeError if it has others."""
    _expect_known(value, user)
    if not any(isinstance(each, Placeholder) for each in tensors_of(value)):
        return value
    return map_tensors(lambda each: each.plain() if isinstance(each, Placeholder) else each, value)


def is_computed(value: Any) -> bool:
    """Whether this segment has the values of all tensors in ``value``."""
    return not any(
        not each.is_known[0] if isinstance(each, Placeholder) else isinstance(each, Untouched) or is_placeholder(each)
        for each in tensors_of(value)
    )


def _is_known(value: Any) -> bool:
    return all(each.is_known[0] for each in tensors_of(value) if isinstance(each, Placeholder))


def _expect_known(value: Any, user: str) -> None:
    if not _is_known(value):
        raise RuntimeError(f"{user} uses what another part of the model computes, and did not {WITH_SAMPLE}")


_LIKE = frozenset([Tensor.to, Tensor.type_as])


class Untouched(Tensor):
    """The output of a block where only the next block used it with the sample. Nothing else may use it or its sizes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SIZES:
            raise RuntimeError(f"the forward asks for the sizes of what a block returns, and did not {WITH_SAMPLE}")
        if func in _LIKE and not isinstance(args[0], cls):  # only its dtype is read: the result is a plain tensor
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.__name__.partition(".")[0]
        raise RuntimeError(
            f"an operation ({name}) uses what a block returns before the next block is called, and none did "
            f"{WITH_SAMPLE}"
        )
