"""Parameters and buffers that several partitions share: all partitions but the first compute with copies.

Two workers must not add to the same ``.grad`` in an order that depends on timing; and a partition needs its tensors on
its own device. So during a run only the first partition that has such a tensor, its **owner**, computes with the tensor
itself. The modules of every other one hold a copy: a leaf in the same memory, or, on another device, in memory that is
filled when the run begins. When the run ends, the gradients of the copies are added to that of the owner, in the order
of the partitions.

A module that several partitions share is one object, which cannot hold a copy for each; so it is copied too, shallowly.
Layers may read what is shared. What one of them changes, be it an attribute of a shared module, is refused by name.

Source: the tied layers of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from streams import current_stream, record_stream

from ._parameters import modules_below
from ._stage import Stage

Grown = tuple[Tensor, Tensor]
"""A leaf and its gradient."""


def shared_tensors(parts: Sequence[Iterable[nn.Module]]) -> dict[int, int]:
    """The parameters and buffers that modules of several ``parts`` have: by identity, the number of the first part."""
    found = [_tensors_of(modules) for modules in parts]
    if sum(map(len, found)) == len(set[int]().union(*found)):
        return {}
    first: dict[int, int] = {}
    several: set[int] = set()
    for j, own in enumerate(found):
        several |= own & first.keys()
        first |= dict.fromkeys(own - first.keys(), j)
    return {key: first[key] for key in several}


def holds_tensors(module: nn.Module) -> bool:
    """Whether ``module``, or one in it, has parameters or buffers."""
    return any(below._parameters or below._buffers for below in modules_below(module))


def _tensors_of(modules: Iterable[nn.Module]) -> set[int]:
    found: set[int] = set()
    for module in modules:
        for own in (module._parameters, module._buffers):
            if own:
                found.update(map(id, own.values()))
    found.discard(id(None))
    return found


class Tied:
    """The tensors that several partitions of ``stages`` share, for one run, which begins here.

    Layers may have been changed since the last run, so each run looks for shared tensors again.

    Attributes:
        shares: whether there are any; if not, nothing has to be applied or joined.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        parts = [modules_below(stage.module) for stage in stages] if len(stages) > 1 else []
        shared = shared_tensors(parts)
        self.shares = bool(shared)
        self._copies: list[_Copies] = []
        self._looked = False
        earlier: set[nn.Module] = set()
        for number, modules in enumerate(parts if shared else ()):
            self._copies.append(_Copies(number, stages[number].device, modules, shared, frozenset(earlier)))
            earlier.update(modules)
        self._owners = {
            copy: (number, tensor)
            for number, copies in enumerate(self._copies)
            for tensor, copy in copies.tensors.items()
        }
        self._versions = [
            (tensor, _version(tensor)) for pair in self._owners.items() for tensor in (pair[0], pair[1][1])
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the modules of each stage hold its copies. There must be no other run of the stages.

        Raises:
            RuntimeError: in the first use, which includes all forwards, if a forward has changed what is shared.
        """
        swaps = [swap for copies in self._copies for swap in copies.swaps]
        before = [entries.get(name) for entries, name, _ in swaps]
        for entries, name, copy in swaps:
            dict.__setitem__(entries, name, copy)
        try:
            yield
            self._expect_unchanged(None)
        except RuntimeError as error:
            self._expect_unchanged(error)  # the change may be the cause of the error
            raise
        finally:
            self._looked = True
            for (entries, name, copy), own in zip(swaps, before, strict=True):
                if entries.get(name) is copy:  # a layer may have set something else
                    dict.__setitem__(entries, name, own)

    @property
    def leaves(self) -> list[list[Tensor]]:
        """For each stage the leaves, owners and copies, whose gradients have to be summed."""
        found = [list(filter(_is_trained, copies.tensors.values())) for copies in self._copies]
        return found or [[]] * len(self._stages)

    def joined(self, grown: Sequence[Grown]) -> list[Grown]:
        """``grown`` with owners in place of copies, gradients on the owner's device, in the order of the stages."""
        found = [(*self._owners.get(leaf, (0, leaf)), gradient) for leaf, gradient in grown]
        found.sort(key=lambda each: each[0])
        # An owner may have been frozen since the forward: then autograd drops its gradient too.
        return [(owner, _arrived(gradient, owner.device)) for _, owner, gradient in found if owner.requires_grad]

    def _expect_unchanged(self, cause: RuntimeError | None) -> None:
        change = None if self._looked else self._change()
        if change is not None:
            raise RuntimeError(
                f"a layer changed {change}, which partitions share; they work side by side, so that they may only read "
                "it: put the layers that share it into one partition, or give each a copy of its own"
            ) from cause

    def _change(self) -> str | None:
        """The name of something shared that a layer has changed."""
        tensors = (self._owners[tensor][1] for tensor, version in self._versions if _version(tensor) != version)
        names = ((module, name) for copies in self._copies for module, name in copies.changed())
        return next(
            chain(
                (f"{self._name(tensor)} in place" for tensor in tensors),
                (f"{name!r} of {self._name(module)}" for module, name in names),
            ),
            None,
        )

    def _name(self, wanted: Tensor | nn.Module) -> str:
        """The names of a shared tensor or module in the first and the last stage that have it."""
        found = [
            f"{name!r} of partition {stage.index}"
            for stage, copies in zip(self._stages, self._copies, strict=True)
            for name, value in _named(stage.module)
            if value is wanted or value is copies.tensors.get(wanted) or value is copies.modules.get(wanted)
        ]
        return " and ".join(dict.fromkeys([*found[:1], *found[-1:]]))


def _named(root: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)
    yield from root.named_modules(remove_duplicate=False)


def _arrived(gradient: Tensor, device: torch.device) -> Tensor:
    """``gradient`` on ``device``. The current streams wait for those on which it was computed."""
    for part in (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,):
        record_stream(part, current_stream(part.device))
    return gradient.to(device)


class _Copies:
    """The tensors and modules with which a partition computes.

    Args:
        number: the number of the partition among those in this process.
        device: its device.
        modules: its modules.
        shared: by identity of a tensor, the number of the first partition that has it.
        earlier: the modules of the partitions before.

    Attributes:
        tensors: for each shared tensor that of this partition: a copy, or the tensor itself.
        modules: copies of the modules that an earlier partition has too.
        swaps: the dicts of modules and the names in them that refer to copies during a run, and these copies.
    """

    def __init__(
        self,
        number: int,
        device: torch.device,
        modules: Mapping[nn.Module, None],
        shared: Mapping[int, int],
        earlier: frozenset[nn.Module],
    ) -> None:
        self._owned = {key for key, first in shared.items() if first == number}
        self._device = device
        self._shared = shared
        self._earlier = earlier
        self.tensors: dict[Any, Tensor] = {}
        self.modules: dict[Any, nn.Module] = {}
        self.swaps: list[tuple[dict[str, Any], str, Any]] = [
            (entries, name, own)
            for module in modules.keys() - earlier
            for entries in _entries(module)
            for name, value in entries.items()
            if (own := self._own(value)) is not value
        ]
        self._then = {module: _seen(copy) for module, copy in self.modules.items()}

    def _own(self, value: Any) -> Any:
        """What this partition has in place of a tensor or module."""
        if isinstance(value, nn.Module):
            return self._own_module(value) if value in self._earlier and holds_tensors(value) else value
        if id(value) in self._shared and value not in self.tensors:
            self.tensors[value] = value if id(value) in self._owned else copy_of(value, self._device)
        return self.tensors[value] if id(value) in self._shared else value

    def _own_module(self, module: nn.Module) -> nn.Module:
        if module not in self.modules:
            self.modules[module] = copy = object.__new__(type(module))
            vars(copy).update(vars(module), _compiled_call_impl=None)  # that call is bound to ``module``
            for kind in _KINDS:
                vars(copy)[kind] = {name: self._own(value) for name, value in vars(module)[kind].items()}
        return self.modules[module]

    def changed(self) -> Iterator[tuple[nn.Module, str]]:
        """Shared modules in which the stage has changed something, and its name."""
        for module, then in self._then.items():
            now = _seen(self.modules[module])
            yield from ((module, name) for name in {**now, **then} if now.get(name) != then.get(name))


_KINDS = ("_parameters", "_buffers", "_modules")


def _entries(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which ``module`` holds tensors and modules."""
    return [vars(module)[kind] for kind in _KINDS]


def _seen(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The identity and version of all that ``module`` holds, by name."""
    held = [item for entries in (vars(module), *_entries(module)) for item in entries.items()]
    return {name: (id(value), _version(value)) for name, value in held}


def _version(value: Any) -> int:
    """The number of changes in place of a tensor that torch has counted; 0 for anything else."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A leaf like ``tensor`` on ``device``: in the same memory if it is there; ``tensor`` itself if not trained."""
    there = (tensor.detach() if _is_trained(tensor) else tensor).to(device)
    if there is tensor:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, tensor.requires_grad)
    return there.requires_grad_() if _is_trained(tensor) else there


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf
