"""The copy of a model for one segment: the segment's own parts, and placeholders for everything else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ._cache import uncached


def skeleton(
    module: nn.Module,
    replaced: Mapping[nn.Module, nn.Module],
    keeps: Callable[[Tensor], bool],
    twins: list[Follower],
    path: str = "",
) -> nn.Module:
    """A copy of ``module`` in which some modules are replaced. The other modules are shared with ``module``.

    Args:
        module: the model, or a part of it.
        replaced: the modules to replace, with their replacements.
        keeps: whether a parameter or buffer of a module around replaced ones is kept. The others become placeholders:
            buffers of the same shape, filled with NaN (integers: 0).
        twins: the copies that are made are added here.
        path: the name of ``module`` in the model, with a dot at the end.

    Returns:
        ``module`` itself, or a shallow copy of it if modules inside it are replaced.
    """
    if module in replaced:
        return replaced[module]
    if replaced.keys().isdisjoint(module.modules()):
        return module
    twin = twin_of(module)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else skeleton(child, replaced, keeps, twins, f"{path}{name}.")
    for name, parameter in module._parameters.items():
        if parameter is not None and not keeps(parameter):
            del twin._parameters[name]
            twin.register_buffer(name, _unknown(parameter), persistent=False)
    for name, buffer in module._buffers.items():
        if buffer is not None and not keeps(buffer):
            del twin._buffers[name]
            twin.register_buffer(name, _unknown(buffer), persistent=False)
    first = next(module.parameters(), None)
    if first is not None and next(twin.parameters(), None) is None:
        _answer_for_parameters(twin, first)
    twins.append(Follower(twin, module, path))
    return twin


def _answer_for_parameters(twin: nn.Module, like: Tensor) -> None:
    """Make ``next(twin.parameters())`` return a placeholder where ``twin`` has no parameters.

    Models ask it for their dtype and device.
    """
    number = torch.full((), math.nan, dtype=like.dtype, device=like.device)
    # register_buffer would raise: modules such as those of peft look up unknown attributes in a module inside, which
    # may have this one already.
    twin._buffers["stands_for_parameters"] = placeholder(number)
    twin._non_persistent_buffers_set.add("stands_for_parameters")
    twin.__dict__["parameters"] = partial(_stand_in_of, twin)


def _stand_in_of(twin: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    number = twin._buffers["stands_for_parameters"]
    assert number is not None
    yield number


def twin_of(module: nn.Module) -> nn.Module:
    """A shallow copy with the same parameters, buffers, children and hooks, in dicts of its own."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name.startswith("_"):
            twin.__dict__[name] = copy.copy(value)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return twin


class Follower:
    """A copy of a module of the model that follows it: its mode, hooks, attributes, parameters and buffers.

    Args:
        module: the copy.
        source: the module of the model.
        path: the name of ``source``, with a dot at the end.
    """

    def __init__(self, module: nn.Module, source: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self.source = source
        self._children = dict(source._modules)
        self._then = self._tensors()
        self._hooks = dict(source._forward_hooks)
        self.follow()

    def _tensors(self) -> dict[tuple[str, str], Any]:
        return {(kind, name): value for kind in _TENSORS for name, value in vars(self.source)[kind].items()}

    def follow(self) -> None:
        """Take over what has changed in the model.

        Raises:
            RuntimeError: a module in it was replaced, so that the layers would compute with the one before.
        """
        children = self.source._modules
        if children != self._children:
            names = [name for name in {**self._children, **children} if children.get(name) != self._children.get(name)]
            raise RuntimeError(
                f"{', '.join(repr(self.path + name) for name in names)} of the model was replaced after it was "
                "flattened, and the layers would compute with the module before; make a new pipe of the model"
            )
        own = vars(self.module)
        own.update({name: self._bound(value) for name, value in vars(self.source).items() if name not in _OWN})
        # The copy has hooks of its own, also of another thread that runs it.
        hooks, self._hooks = self._hooks, dict(self.source._forward_hooks)
        if hooks != self._hooks:
            for key in hooks.keys() - self._hooks.keys():
                del self.module._forward_hooks[key]
            self.module._forward_hooks.update(self._hooks)
        # Compared to what was there before, not to the copy's: during a run it may have a copy of what is shared.
        for (kind, name), value in (now := self._tensors()).items():
            mine = own[kind].get(name)
            if mine is None or is_placeholder(mine):
                self._liken(name, value)
            elif self._then.get((kind, name)) is not value:
                own[kind][name] = value
        self._then = now
        self._liken("stands_for_parameters", next(self.source.parameters(), None), ())

    def _liken(self, name: str, value: Tensor | None, shape: Sequence[int] | None = None) -> None:
        """Give the placeholder for ``value``, if there is one, the dtype and shape that this has."""
        mine = self.module._buffers.get(name)
        if value is None or mine is None:
            return
        shape = value.shape if shape is None else shape
        if (mine.dtype, mine.shape) != (value.dtype, shape):
            self.module._buffers[name] = _unknown(torch.empty(shape, dtype=value.dtype, device=mine.device))

    def lead(self) -> None:
        """Let the module of the model be in evaluation mode if the copy is; not the model, which a pipe trains."""
        if self.path:
            self.source.training &= self.module.training

    def _bound(self, value: Any) -> Any:
        is_own = isinstance(value, MethodType) and value.__self__ is self.source
        return MethodType(value.__func__, self.module) if is_own else uncached(value)


_TENSORS = ("_parameters", "_buffers")
_OWN = {*_TENSORS, "_modules", "_non_persistent_buffers_set", "_forward_hooks"}


def _unknown(tensor: Tensor) -> Tensor:
    value = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return placeholder(torch.full_like(tensor, value, requires_grad=False))


def placeholder(tensor: Tensor) -> Tensor:
    """Mark ``tensor`` as the placeholder of a tensor that belongs to another segment, and return it."""
    tensor.stands_in = True  # type: ignore[attr-defined]  # copies of it have this too
    return tensor


def is_placeholder(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a :func:`placeholder`, or a copy of one."""
    return hasattr(tensor, "stands_in")


def named_units(
    model: nn.Module, blocks: frozenset[nn.Module], called: frozenset[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules, with their names, that are not in ``blocks`` and are called as a whole or not at all."""
    for name, child in model.named_children():
        if child in blocks:
            continue
        if child in called or (blocks | called).isdisjoint(child.modules()):
            yield name, child
        else:
            for inner, unit in named_units(child, blocks, called):
                yield f"{name}.{inner}", unit
