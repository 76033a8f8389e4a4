"""Intercept operations, custom functions and pipes of a model between its blocks; give them tensors of their stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch import (
    call_functions_by,
    function_modes,
    pop_function_mode,
    push_function_mode,
    saved_tensors_hooks,
    set_function_modes,
    with_lost_weight,
)
from ..module._in_one_operation import HandlesPipes, in_one_operation
from ..module._transforms import not_compiled
from ..values._leaves import get_tensors, version
from ._called import answered_by


class Looks(Protocol):
    """Handles the operations of a model between its blocks.

    Attributes:
        is_of_forward: whether these are the operations of one forward, on its own thread.
        device: the device of the current stage.
    """

    is_of_forward: bool

    @property
    def device(self) -> torch.device: ...

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operation ``function``."""

    def read(self, tensor: Tensor) -> None:
        """Note that the model reads the shape of ``tensor``."""


class Between(HandlesPipes):
    """Lets ``looks`` compute each operation. The mode is off inside blocks.

    Attributes:
        only_here: whether no other thread may enter the mode, so that a pipeline cannot begin in it.
    """

    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self.looks = looks
        self.only_here = looks.is_of_forward
        self._around: list[Any] | None = None  # the modes outside this one while it is entered
        self._outside: object = None
        self._region: object = None
        self._has: set[bool] = set()

    def __enter__(self) -> Any:
        self._outside = saved_tensors_hooks()
        self._around = [*function_modes()]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the mode, if it is entered, even if an interrupt in :meth:`off` has changed the modes."""
        if self._around is None:
            return
        if next(function_modes(), None) is self:
            pop_function_mode()
        else:
            set_function_modes(self._around)
        self._around = None

    @not_compiled
    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = with_lost_weight(function, kwargs)
        kind = _kind(function)
        if kind is not None:
            if kind and args and isinstance(args[0], Tensor):
                self.looks.read(args[0])
            found = function(*args, **kwargs)
            # The model must not see that tensors of other processes are on meta.
            return self.looks.device if isinstance(found, torch.device) and found.type == "meta" else found
        self.expect_no_checkpoint(is_block=False)
        return self.looks.operate(function, args, kwargs)

    def apply(self, applied: Applied, args: tuple[Any, ...]) -> Any:
        """Call a ``torch.autograd.Function`` with tensors of the current stage."""
        with self.off():
            self.expect_no_checkpoint(is_block=False)
            given = self.looks.operate(_arguments, args, {})
            if any(tensor.is_meta for tensor in get_tensors(given)):
                return self.looks.operate(applied, args, {})
        before = [(tensor, version(tensor)) for tensor in get_tensors(given)]
        # Its own operations are the model's. They may use tensors that are no arguments, or even call blocks.
        output = applied(*given)
        altered = [tensor for tensor, then in before if version(tensor) != then]

        def end(*_: Any) -> Any:
            for tensor in altered:  # an operation that ends now has modified them
                tensor.detach().as_strided((0,), (1,)).zero_()
            return output

        with self.off():
            return self.looks.operate(end, args, {})

    def call(self, compute: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``compute``, which runs a pipeline, as a single operation."""
        with self.off():
            if not self.looks.is_of_forward:
                return in_one_operation(compute, *args)
            self.expect_no_checkpoint(is_block=False)
            with answered_by(None):
                return self.looks.operate(compute, args, {})

    def expect_no_checkpoint(self, *, is_block: bool) -> None:
        """Raise RuntimeError if the model calls blocks and operations of its own in one ``torch.utils.checkpoint``.

        The backward would recompute both, and there blocks save different tensors than in the forward.
        """
        hooks: Any = saved_tensors_hooks()
        if hooks == self._outside or not is_checkpoint(hooks) or not torch.is_grad_enabled():
            return
        if hooks[0] is not self._region:
            self._region, self._has = hooks[0], set()
        self._has.add(is_block)
        if len(self._has) > 1:
            raise RuntimeError(
                "the model calls a block inside torch.utils.checkpoint, beside operations of its own, whose gradients "
                "would be wrong; leave checkpointing to GPipe(checkpoint=...), or checkpoint the block alone"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the mode while a single stage works, because the mode takes as long as a small operation.

        Modes that the model has entered since, such as ``torch.device(...)``, stay active. This one is removed and not
        just disabled, because a pipe inside a block captures the modes for its threads and for a later backward.
        """
        before = [*function_modes()]
        try:
            below = _leave(self)
        except BaseException:
            set_function_modes(before)
            raise
        try:
            yield
        finally:
            # After an interrupt this may run late, when the mode has been left.
            if below is not None and self._around is not None:
                try:
                    _enter_above(self, below)
                except BaseException:
                    set_function_modes(before)
                    raise


def _leave(mode: Between) -> int | None:
    """Leave ``mode``, and return the number of modes around it; None if it is not active."""
    modes = [*function_modes()]
    if mode not in modes:
        return None
    inner = modes.index(mode)
    for _ in range(inner + 1):
        pop_function_mode()
    for each in reversed(modes[:inner]):
        push_function_mode(each)
    return len(modes) - inner - 1


def _enter_above(mode: Between, below: int) -> None:
    """Enter ``mode`` inside the outermost ``below`` modes, and around the others."""
    modes = [*function_modes()]
    inside = modes[: max(len(modes) - below, 0)]
    for _ in inside:
        pop_function_mode()
    for each in (mode, *reversed(inside)):
        push_function_mode(each)


def is_checkpoint(hooks: Any) -> bool:
    """Return whether these ``hooks`` for saved tensors, if any, are those of a ``torch.utils.checkpoint``."""
    return hooks is not None and hooks[0].__module__ == _CHECKPOINT


class Applied:
    """Calls a ``torch.autograd.Function``.

    Attributes:
        kind: its class.
    """

    def __init__(self, kind: type, compute: Callable[..., Any]) -> None:
        self.kind, self.__name__, self._compute = kind, kind.__name__, compute

    def __call__(self, *args: Any) -> Any:
        return self._compute(*args)


def _apply(kind: type, compute: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a ``torch.autograd.Function``; between blocks, with tensors of the current stage."""
    mode = _innermost()
    return compute(*args) if mode is None else mode.apply(Applied(kind, compute), args)


call_functions_by(_apply)


def _innermost() -> Between | None:
    return next((each for each in function_modes() if isinstance(each, Between)), None)


def _arguments(*args: Any) -> tuple[Any, ...]:
    return args


def _kind(function: Callable[..., Any]) -> bool | None:
    """Return None for an operation on values, else whether it reads a shape."""
    if function in _SHAPES:
        return True
    if function in _ABOUT:
        return False
    if getattr(function, "__name__", "") == "__set__":
        # After a function has modified a view, torch sets these while it holds a lock that reading ``grad_fn`` needs.
        return False if getattr(getattr(function, "__self__", None), "__name__", "") == "_backward_hooks" else None
    if getattr(function, "__name__", "") == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        return None if name in _VALUES else name == "shape"
    return None


_CHECKPOINT = "torch.utils.checkpoint"
"""The module whose hooks recompute saved tensors. Hooks of other modules may move or compress them instead."""

_SHAPES = {Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride, torch.numel}
"""Functions that read shapes."""

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
"""Functions that concern the tensor itself, on any device."""

_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data"}
"""Attributes that are computed from values."""
