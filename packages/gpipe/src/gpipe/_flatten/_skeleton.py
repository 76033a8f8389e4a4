"""The copy of a model for one segment: the segment's own parts, and placeholders for everything else."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .._current import current
from ._cache import uncached
from ._calls import Like
from ._placeholders import is_computed, unknown
from ._trunk import outermost

_OBSERVE = -1
"""The number of a hook that is not the user's."""
_NUMBER = "stands_for_parameters"
_TENSORS = ("_parameters", "_buffers")
_LISTS = (nn.ParameterList, nn.ParameterDict)
"""Never called, but gone through: they have placeholders for parameters of other segments, as modules around have."""
_OWN = {*_TENSORS, "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_follower"}
_UNTOLD = {*_OWN, "training", "named_modules", "state_dict", "parameters"}


def skeleton(
    module: nn.Module,
    replaced: Mapping[nn.Module, nn.Module],
    keeps: Callable[[Tensor], bool],
    observed: Mapping[nn.Module, Callable[..., None]],
    path: str = "",
) -> nn.Module:
    """``module``, or a shallow copy of it with a :class:`Follower`, if modules in it are ``replaced`` or ``observed``.

    Args:
        replaced: the modules to replace, with their replacements.
        keeps: whether a parameter or buffer of a module around replaced ones is kept. The others become placeholders:
            buffers of the same shape, filled with NaN (integers: 0).
        observed: modules whose copies have a forward hook.
        path: the name of ``module`` in the model, with a dot at the end.
    """
    if module in replaced:
        return replaced[module]
    is_around = not replaced.keys().isdisjoint(module.modules()) or isinstance(module, _LISTS)
    if not is_around and observed.keys().isdisjoint(module.modules()):
        return module
    twin = twin_of(module)
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = skeleton(child, replaced, keeps, observed, f"{path}{name}.")
    if is_around:
        vars(twin).update(named_modules=partial(_named_modules, twin), state_dict=partial(_state_dict, twin))
    follower = Follower(twin, module, path, keeps if is_around else lambda tensor: True, observed.get(module))
    vars(twin)["_follower"] = follower
    return twin


def twin_of(module: nn.Module) -> nn.Module:
    """A shallow copy with the same tensors, children and hooks, in dicts and sets of its own."""
    twin: nn.Module = object.__new__(type(module))  # some classes refuse copy.copy, such as parametrized ones
    for name, value in vars(module).items():
        twin.__dict__[name] = value
        if isinstance(value, (dict, set)) and name.startswith("_"):
            twin.__dict__[name] = copy.copy(value)
    return twin


class Follower:
    """Lets a copy of a module of the model follow it: its mode, hooks, attributes, parameters and buffers.

    Args:
        module: the copy.
        source: the module of the model.
        path: the name of ``source``, with a dot at the end.
        keeps: whether the copy has a parameter or buffer of ``source``; else it has a placeholder.
        observe: a forward hook of the copy, after those of ``source``.
    """

    def __init__(
        self,
        module: nn.Module,
        source: nn.Module,
        path: str,
        keeps: Callable[[Tensor], bool],
        observe: Callable[..., None] | None,
    ) -> None:
        self.module, self.source, self.path = module, source, path
        self._children = dict(source._modules)
        self._observe = {} if observe is None else {_OBSERVE: observe}
        own = [value for kind in _TENSORS for value in vars(source)[kind].items()]
        self._others = {name for name, value in own if value is not None and not keeps(value)}
        # What was there at the last time. During a run the copy itself may have a copy of what is shared.
        self._then: dict[tuple[str, str], Any] = {}
        self._given: dict[str, Any] = {}
        vars(module).update(_parameters={}, _buffers={})
        self.follow()
        first = next(source.parameters(), None)
        if first is not None and next(module.parameters(), None) is None:
            # Models ask their first parameter for a dtype and a device.
            self._set_placeholder(_NUMBER, first.dtype, torch.Size(), first.device)
            vars(module)["parameters"] = partial(_number_of, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Follower:
        """A copy of a layer alone does not copy the model; a copy of a pipe has copied the model before."""
        found = copy.copy(self)
        found.source = memo.get(id(self.source), self.source)
        for name in ("module", "_then", "_given", "_children"):
            setattr(found, name, copy.deepcopy(getattr(self, name), memo))
        return found

    def follow(self) -> None:
        """Take over what has changed in the model; RuntimeError if a module in it was replaced."""
        children, before = self.source._modules, self._children
        if children != before:
            names = [name for name in {**before, **children} if children.get(name) != before.get(name)]
            raise RuntimeError(
                f"{', '.join(repr(self.path + name) for name in names)} of the model was replaced after it was "
                "flattened, and the layers would compute with the module before; make a new pipe of the model"
            )
        own, before = vars(self.module), self._given
        self._given = {name: self._bound(value) for name, value in vars(self.source).items() if name not in _OWN}
        for name in before.keys() - self._given.keys():
            own.pop(name, None)
        own.update(self._given)
        hooks = OrderedDict({**self.source._forward_hooks, **self._observe})
        if own["_forward_hooks"] != hooks:
            own["_forward_hooks"] = hooks
        for kind in _TENSORS:
            for name, value in vars(self.source)[kind].items():
                if name in self._others and value is not None:
                    self._set_placeholder(name, value.dtype, value.shape, value.device)
                elif name not in self._others and self._then.get((kind, name), self) is not value:
                    own[kind][name] = self._then[kind, name] = value
        if _NUMBER in own["_buffers"]:
            first = next(self.source.parameters())
            self._set_placeholder(_NUMBER, first.dtype, torch.Size(), first.device)

    def tell(self) -> None:
        """After a forward: set in the model the attributes that the forward has set in the copy.

        Not what it has computed of other segments, which tell their own.
        """
        for name, value in vars(self.module).items():
            if name not in _UNTOLD and self._given.get(name, self) is not value and is_computed(value):
                vars(self.source)[name] = self._given[name] = value

    def _set_placeholder(self, name: str, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
        """Set a buffer filled with NaN, where the one before is, unless that has this dtype and shape."""
        mine = self.module._buffers.get(name)
        if mine is None or (mine.dtype, mine.shape) != (dtype, shape):
            # register_buffer would raise: modules such as those of peft look up unknown attributes in a module inside,
            # which may have this one already.
            self.module._buffers[name] = unknown(Like(shape, dtype), device if mine is None else mine.device)
            self.module._non_persistent_buffers_set.add(name)

    def lead(self) -> None:
        """Let the module of the model be in evaluation mode if the copy is; not the model, which a pipe trains."""
        if self.path:
            self.source.training &= self.module.training

    def _bound(self, value: Any) -> Any:
        is_own = isinstance(value, MethodType) and value.__self__ is self.source
        return MethodType(value.__func__, self.module) if is_own else uncached(value)


def follower_of(module: nn.Module) -> Follower | None:
    found: Follower | None = vars(module).get("_follower")
    return found


def followers(layers: nn.Module) -> list[Follower]:
    return [found for module in layers.modules() if (found := follower_of(module)) is not None]


def unfollow(module: nn.Module) -> None:
    """Let ``module``, if it is a copy with a follower, follow its source no longer."""
    vars(module).pop("_follower", None)


def _number_of(twin: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    number = twin._buffers[_NUMBER]
    assert number is not None
    yield number
    _expect_outside(twin)


def _named_modules(twin: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
    """Those that are here, as often as it is enough: parameters and buffers are found by these too."""
    yield from type(twin).named_modules(twin, memo, *args, **kwargs)
    if memo is None:  # else it is a part of what goes on
        _expect_outside(twin)


def _state_dict(twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
    _expect_outside(twin)
    return type(twin).state_dict(twin, *args, **kwargs)


def _expect_outside(twin: nn.Module) -> None:
    """Raise RuntimeError if a forward goes on."""
    if current.work.tape is not None:
        raise RuntimeError(
            f"the forward goes over all modules, parameters or buffers of a {type(twin).__name__}, and some of them "
            "belong to other layers; compute this outside of the forward, as in loss_fn, or let blocks return it"
        )


def named_units(
    model: nn.Module, blocks: frozenset[nn.Module], called: frozenset[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules, with their names, that are not in ``blocks`` and are called as a whole or not at all."""
    return outermost(
        model,
        fits=lambda module: module in called or (blocks | called).isdisjoint(module.modules()),
        skips=lambda module: module in blocks or isinstance(module, _LISTS),
    )
