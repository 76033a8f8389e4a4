"""What runs of a model change in it: buffers, and attributes of modules."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from ._collected import HOOKED
from ._names import Part
from ._skeleton import followers
from ._standins import StandIn


class Changed(NamedTuple):
    """What runs of a model have changed: buffers in place, and attributes that were set, or elements of these.

    Attributes:
        buffers: each with its path.
        attributes: the path, the module, the name, and whether a copy of the module would have one of its own.
    """

    buffers: list[tuple[str, Tensor]]
    attributes: list[tuple[str, nn.Module, str, bool]]

    def expect_of_one(self, name: str, layers: nn.Sequential) -> None:
        """Raise ValueError, with the model's ``name``, if several layers have what changed, or read that of another.

        It may be of any micro-batch, and have the graph of another stage.
        """
        nets = Counter(layer.net for layer in layers if isinstance(layer, Part))
        again = {module for net, times in nets.items() if times > 1 for module in net.modules()}
        held = Counter(buffer for net in nets.elements() for buffer in set(net.buffers()))
        for path, buffer in self.buffers:
            if held[buffer] > 1:
                raise ValueError(
                    f"{name} cannot be divided: {path!r}, a buffer, changes in training, and is used by several parts "
                    "of the forward; let one module, which is called once, have it, and the others take what that "
                    "returns"
                )
        asked = {each for module in layers.modules() if isinstance(module, StandIn) for each in module.real.asked}
        divided = {twin.source for twin in followers(layers)}
        for path, module, attribute, is_own in self.attributes:
            if (module, attribute) in asked or module in again or (is_own and module in divided):
                raise ValueError(
                    f"{name} cannot be divided: its forward sets {path!r} anew in each run, and several parts of it "
                    "would have one each, or read that of another part; keep it in a buffer, and change that in place, "
                    "or let the module return it"
                )

    def expect_none_of_loss(self, name: str, last: Part, apart: Iterable[str]) -> None:
        """Raise ValueError if the loss changes a buffer, which each micro-batch would do.

        Args:
            last: the segment with the loss.
            apart: the names of modules in it that compute rows, and no loss.
        """
        own, others = {*last.net.buffers()}, tuple(f"{each}." for each in apart)
        for path, buffer in self.buffers:
            if buffer in own and not path.startswith(others):
                raise ValueError(
                    f"{name} cannot be divided: its loss changes {path!r}, a buffer, and would do so for each "
                    "micro-batch; change it outside of the forward, once a mini-batch, or give step() a loss_fn: "
                    'GPipe(model, sample=sample, pick="logits"), or another part of the output'
                )


class State:
    """The attributes and buffers of a model as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._entries = {module: (dict(vars(module)), dict(module._buffers)) for module in model.modules()}
        self._known = {module: _attributes(module) for module in model.modules()}
        held = (value for module in model.modules() for name, value in vars(module).items() if _is_held(name, value))
        self._contents = [(value, value.copy()) for value in held]
        self._values = [(name, each, each.clone()) for name, each in model.named_buffers() if not each.is_meta]

    def changed(self) -> Changed:
        attributes = [each for path, module in self._model.named_modules() for each in self._set_in(path, module)]
        return Changed([(name, each) for name, each, then in self._values if not torch.equal(each, then)], attributes)

    def _set_in(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
        if module not in self._known:
            raise ValueError(
                f"{type(self._model).__name__} cannot be divided: its forward makes the module {path!r} anew; make it "
                "when the model is built"
            )
        known, found = self._known[module], _attributes(module)
        for key in {**known, **found}:
            value, then = found.get(key, _NONE), known.get(key, _NONE)
            is_number = isinstance(value, Number) and isinstance(then, Number)
            if value is not then and not (is_number and value == then):
                name, *inside = key
                title = ".".join(filter(None, (path, name))) + "".join(f"[{each!r}]" for each in inside)
                yield title, module, name, is_number or name in self._entries[module][1]

    def restore(self) -> None:
        for module, (attributes, buffers) in self._entries.items():
            if HOOKED in vars(module):
                attributes = {**attributes, HOOKED: True}
            for entries, then in ((vars(module), attributes), (module._buffers, buffers)):
                entries.clear()
                entries.update(then)
        for held, contents in self._contents:
            held.clear()
            (held.update if isinstance(held, dict) else held.extend)(contents)
        for _, buffer, value in self._values:
            if not torch.equal(buffer, value):  # batch norm changes its buffers without a count in _version
                buffer.data.copy_(value)


_NONE = object()
_OWN = frozenset(vars(nn.Module()))


def _is_held(name: str, value: Any) -> bool:
    """Whether an attribute is a list or a dict, but for those that each module has."""
    return type(value) in (list, deque, dict) and name not in _OWN


def _attributes(module: nn.Module) -> dict[tuple[Any, ...], Any]:
    """The attributes and buffers of ``module``, by name; of lists and dicts the elements."""
    found: dict[tuple[Any, ...], Any] = {}
    for name, value in {**vars(module), **module._buffers}.items():
        if _is_held(name, value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found |= {(name, key): each for key, each in items}
        else:
            found[name,] = value
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[State]:
    """A context in which runs of ``model`` leave no trace: buffers, attributes and random numbers stay as they are."""
    state = State(model)
    try:
        with fork_rng(devices=[]):
            yield state
    finally:
        state.restore()
