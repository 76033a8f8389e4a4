"""Between blocks, see every operation of a model, and give it tensors of the stage that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import pop_function_mode, push_function_mode, top_function_mode
from ._tree import changed


class Looks(Protocol):
    """Sees the tensors of operations."""

    def here(self, tensor: Tensor) -> Tensor:
        """Return what an operation uses in place of ``tensor``."""

    def read(self, tensor: Tensor) -> None:
        """Note that the model reads the shape of ``tensor``."""

    def change(self, tensor: Tensor) -> Tensor:
        """Note that the model is about to change ``tensor`` in place, and return it."""


class Between(TorchFunctionMode):
    """Gives each operation the tensors that ``looks`` has for it. Off inside of blocks."""

    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self._looks = looks
        self.is_off = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            return function(*args, **kwargs)
        kind = _kind(function)
        if kind is not None:
            if kind and args and isinstance(args[0], Tensor):
                self._looks.read(args[0])
            return function(*args, **kwargs)
        looked: Any = changed(args, self._looks.here)
        target = _target(function, looked, kwargs)
        if target is not None:
            changed(target, self._looks.change)
        return function(*looked, **(changed(kwargs, self._looks.here) if kwargs else kwargs))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context for what belongs to one stage: the mode is left, since it takes as long as a small operation."""
        # The model may have entered another mode since, such as torch.device(...), which has to remain.
        is_top = top_function_mode() is self
        if is_top:
            pop_function_mode()
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before
            if is_top:
                push_function_mode(self)


def _kind(function: Callable[..., Any]) -> bool | None:
    """Return None for an operation on values; else whether it reads a shape."""
    if function in _SHAPES:
        return True
    if function in _ABOUT:
        return False
    if getattr(function, "__name__", "") == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        return None if name in _VALUES else name == "shape"
    return None


def _target(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation changes in place, by the conventions of torch; None if it changes nothing."""
    name = getattr(function, "__name__", "")
    if name in _CHANGING or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
        return args[:1]
    return kwargs.get("out")


_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_CHANGING = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}

_SHAPES = {Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride, torch.numel}
"""What reads shapes."""

_ABOUT = {
    *(
        Tensor.dim,
        Tensor.ndimension,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
        Tensor.is_contiguous,
    ),
    *(Tensor.element_size, Tensor.__hash__, torch.is_floating_point, torch.is_complex),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
    *(Tensor.requires_grad_, Tensor.detach_),
}
"""What is about a tensor itself, wherever it is."""

_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data"}
"""Attributes that are computed from values."""
