"""Modules of a model that contain blocks, as attributes of its pipe: when called, they compute in the pipeline.

Some trainers replace ``pipe.forward``, or call parts of the model: ``pipe.base_model(...)``, then their own loss.
Such a part calls the same blocks as the model, so its forward can run as the model's does, once per micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from ..engine._run_lock import RunLock, locks_of_thread
from ..module._devices import expect_same_device, identities_kept
from ._blocks import Blocks
from ._generate import generate
from ._past import Past, around_blocks


class Computing(Protocol):
    """The pipe of a model."""

    _blocks: Blocks
    _past: Past

    @property
    def _whole_model(self) -> nn.Module: ...

    @property
    def _run_lock(self) -> RunLock: ...

    def _compute(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the output of ``module``, a part of the model around blocks, computed in the pipeline."""


def through(pipe: Computing, value: Any) -> Any:
    """Return ``value``, an attribute of the model, as an attribute of its ``pipe``.

    A module around blocks becomes an :class:`Inner`, even if a method of the model returns it.
    """
    model = pipe._whole_model
    if isinstance(value, nn.Module) and not isinstance(value, Inner):
        around = around_blocks(model, pipe._blocks.values())
        return _seen(pipe, value) if any(value is module for module in around) else value
    if isinstance(value, MethodType) and value.__self__ is model:
        return MethodType(_wrap_method(pipe, value.__func__), model)
    return value


def _wrap_method(pipe: Computing, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``method`` of the model, in which modules around blocks compute in the pipeline while gradients are on.

    Without gradients, as in methods that generate, it computes as the model does.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with pipe._past.entered(pipe._compute) if torch.is_grad_enabled() else nullcontext():
            found = method(*args, **kwargs)
        return through(pipe, found) if isinstance(found, nn.Module) else found

    return call


class _Forward:
    """The forward of an :class:`Inner`, which also computes in the pipeline.

    In contrast to a method, it takes precedence over a forward that was set on the module. Code that sets one often
    calls the previous forward in it. Such a call runs the previous forward, not the pipeline.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __get__(self, inner: Any, kind: type[nn.Module]) -> Any:
        if inner is None:
            return self._own
        module, own = inner._module, inner._module.forward
        then = vars(module).get("forward")

        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_replaced = vars(module).get("forward") is not then
            return own(*args, **kwargs) if is_replaced else inner(*args, **kwargs)

        return call

    def __set__(self, inner: Any, forward: Any) -> None:
        inner._module.forward = forward

    def __delete__(self, inner: Any) -> None:
        del inner._module.forward


class Inner:
    """A module of a model that computes in the pipeline when it is called.

    Apart from that it is the module: its class is a subclass of the module's, and both share all attributes.
    """

    __slots__ = ()
    _pipe: Computing
    _module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipe._run_lock in locks_of_thread():  # in a forward of the pipe, or in generate()
            return self._module(*args, **kwargs)
        return self._pipe._compute(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return through(self._pipe, getattr(self._module, name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._module, memo)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        expect_same_device(fn, (*self._module.parameters(), *self._module.buffers()))
        with identities_kept(self._module):
            self._module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _itself(module: nn.Module) -> nn.Module:
    return module


def _seen(pipe: Computing, module: nn.Module) -> nn.Module:
    kind = type(module)
    if kind not in _classes:
        members: dict[str, Any] = {"__slots__": ("_pipe", "_module"), "forward": _Forward(kind.forward)}
        members |= {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        if hasattr(kind, "generate"):
            members["generate"] = _generate
        _classes[kind] = type(kind.__name__, (Inner, kind), members)
    inner = object.__new__(_classes[kind])
    object.__setattr__(inner, "__dict__", vars(module))
    object.__setattr__(inner, "_pipe", pipe)
    object.__setattr__(inner, "_module", module)
    return inner  # type: ignore[no-any-return]


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    blocks = {*self._pipe._blocks.values()}
    return self._pipe._run_lock.run(lambda: generate(self._module, blocks, *args, **kwargs))


_classes: dict[type[nn.Module], type[Any]] = {}
