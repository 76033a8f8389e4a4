"""Parameters and buffers that several partitions share: all partitions but the first compute with copies.

Two workers must not add to the same ``.grad`` in an order that depends on timing; and a partition needs its tensors on
its own device. So during a run only the first partition that has such a tensor, its **owner**, computes with the tensor
itself. The modules of every other one hold a copy: a leaf in the same memory, or, on another device, in memory that is
filled when the run begins. When the run ends, the gradients of the copies are added to that of the owner, in the order
of the partitions.

A module that several partitions share is one object, which cannot hold a copy for each; so it is copied too, shallowly.
What only the pieces of one partition share is not copied: one worker computes all of them.

Source: the tied layers of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streams import current_stream, record_stream

from ._stage import Stage

Grown = tuple[Tensor, Tensor]
"""A leaf and its gradient."""


def modules_below(root: nn.Module) -> dict[nn.Module, None]:
    """``root`` and all modules in it. ``root.modules()`` takes much longer, because it makes up names."""
    found, stack = {root: None}, [root]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                stack.append(child)
    return found


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
        self._partitions = [[*pieces] for _, pieces in groupby(stages, attrgetter("index"))]
        self._copies: list[_Copies] = []
        self._owners: dict[Tensor, tuple[int, Tensor]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._looked = False
        parts = list(map(_modules_of, self._partitions)) if len(self._partitions) > 1 else []
        shared = shared_tensors(parts)
        self.shares = bool(shared)
        if shared:
            self._copy(parts, shared)

    def _copy(self, parts: Sequence[Mapping[nn.Module, None]], shared: Mapping[int, int]) -> None:
        earlier: set[nn.Module] = set()
        for number, (pieces, modules) in enumerate(zip(self._partitions, parts, strict=True)):
            copies = _Copies(number, pieces[0], shared, frozenset(earlier))
            for module in modules.keys() - earlier:
                copies.take(module, module)
            earlier.update(modules)
            self._copies.append(copies)
            self._owners.update({copy: (number, tensor) for tensor, copy in copies.tensors.items()})
            tensors = chain(copies.tensors, copies.tensors.values())
            self._versions += [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the modules of each stage hold its copies. There must be no other run of the stages.

        Raises:
            RuntimeError: in the first use, which includes all forwards, if a forward has changed a shared tensor.
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
        found = found or [[]] * len(self._partitions)
        return [leaves for leaves, pieces in zip(found, self._partitions, strict=True) for _ in pieces]

    def joined(self, grown: Sequence[Grown]) -> Sequence[Grown]:
        """``grown`` with owners in place of copies, gradients on the owner's device, in the order of the stages."""
        found = [(*self._owners.get(leaf, (0, leaf)), gradient) for leaf, gradient in grown]
        found.sort(key=lambda each: each[0])
        # An owner may have been frozen since the forward: then autograd drops its gradient too.
        return [(owner, _arrived(gradient, owner.device)) for _, owner, gradient in found if owner.requires_grad]

    def _expect_unchanged(self, cause: RuntimeError | None) -> None:
        if self._looked:
            return
        change = next(chain(self._changed_in_place(), self._changed_in_copies()), None)
        if change is not None:
            raise RuntimeError(
                f"a layer changed {change}, which partitions share; they work side by side, so that they may only read "
                "it: put the layers that share it into one partition, or give each a copy of its own"
            ) from cause

    def _changed_in_place(self) -> Iterator[str]:
        for tensor, version in self._versions:
            if tensor._version != version:
                yield f"{self._name(self._owners[tensor][1])} in place"

    def _changed_in_copies(self) -> Iterator[str]:
        for copies in self._copies:
            for module, name in copies.changed():
                yield f"{name!r} of {self._name(module)}"

    def _name(self, wanted: Tensor | nn.Module) -> str:
        """The names of a shared tensor or module in the first and the last stage that have it."""
        found = [
            f"{name!r} of partition {stage.index}"
            for pieces, copies in zip(self._partitions, self._copies, strict=True)
            for stage in pieces
            for name, value in _named(stage.module)
            if value is wanted or value is copies.tensors.get(wanted) or value is copies.modules.get(wanted)
        ]
        return " and ".join(dict.fromkeys([*found[:1], *found[-1:]]))


def _modules_of(pieces: Iterable[Stage]) -> dict[nn.Module, None]:
    return {module: None for stage in pieces for module in modules_below(stage.module)}


def _named(root: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)
    yield from root.named_modules(remove_duplicate=False)


def _arrived(gradient: Tensor, device: torch.device) -> Tensor:
    """``gradient`` on ``device``. The current streams wait for those on which it was computed."""
    for part in (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,):
        record_stream(part, current_stream(part.device))
    return gradient.to(device)


class _Swap(NamedTuple):
    """What a name of a module refers to during a run."""

    entries: dict[str, Any]
    name: str
    copy: Any


class _Copies:
    """The tensors and modules with which a partition computes.

    Args:
        number: the number of the partition among those in this process.
        stage: its stage, or that of its first piece.
        shared: by identity of a tensor, the number of the first partition that has it.
        earlier: the modules of the partitions before.

    Attributes:
        tensors: for each shared tensor that of this partition: a copy, or the tensor itself.
        modules: copies of the modules that an earlier partition has too.
        swaps: the names that refer to copies during a run.
    """

    def __init__(self, number: int, stage: Stage, shared: Mapping[int, int], earlier: frozenset[nn.Module]) -> None:
        self._number = number
        self._stage = stage
        self._shared = shared
        self._earlier = earlier
        self.tensors: dict[Any, Tensor] = {}
        self.modules: dict[Any, nn.Module] = {}
        self.swaps: list[_Swap] = []
        self._then: list[tuple[nn.Module, dict[str, Any]]] = []

    def take(self, module: nn.Module, copy: nn.Module) -> None:
        """Make ``copy``, which may be ``module`` itself, hold the stage's versions of what ``module`` holds."""
        for kind in ("_parameters", "_buffers"):
            self._swap(vars(module)[kind], vars(copy)[kind], self._tensor)
        self._swap(module._modules, copy._modules, self._module)

    def _swap(self, entries: Mapping[str, Any], own: dict[str, Any], of: Callable[[Any], Any]) -> None:
        for name, value in entries.items():
            copy = None if value is None else of(value)
            if own[name] is not copy:
                self.swaps.append(_Swap(own, name, copy))

    def _tensor(self, tensor: Tensor) -> Tensor:
        first = self._shared.get(id(tensor))
        if first is None:
            return tensor
        if tensor not in self.tensors:
            self.tensors[tensor] = tensor if first == self._number else copy_of(tensor, self._stage.device)
        return self.tensors[tensor]

    def _module(self, module: nn.Module) -> nn.Module:
        if module not in self._earlier or not holds_tensors(module):
            return module
        if module not in self.modules:
            self.modules[module] = self._stage.module_copies.setdefault(module, object.__new__(type(module)))
            empty_like(module, self.modules[module])
            self.take(module, self.modules[module])
            self._then.append((module, dict(vars(self.modules[module]))))
        return self.modules[module]

    def changed(self) -> Iterator[tuple[nn.Module, str]]:
        """Shared modules in which the stage has set a name to something else, and these names."""
        for module, then in self._then:
            now = vars(self.modules[module])
            yield from ((module, name) for name in {**now, **then} if now.get(name) is not then.get(name))
        own = {
            id(entries): module for module, then in self._then for entries in (then["_parameters"], then["_buffers"])
        }
        yield from (
            (own[id(entries)], name)
            for entries, name, copy in self.swaps
            if id(entries) in own and entries.get(name) is not copy
        )


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


def empty_like(module: nn.Module, copy: nn.Module) -> None:
    """Make ``copy`` equal to ``module``, but without parameters, buffers and children.

    It is the same object in all runs, with the same dicts: a recomputation finds in them what its forward has used,
    even after other runs.
    """
    own = vars(copy)
    held = {kind: own.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")}
    own.clear()
    own.update(vars(module), **held, _compiled_call_impl=None)  # that call is bound to ``module``
    for kind, entries in held.items():
        entries.clear()
        entries.update(dict.fromkeys(vars(module)[kind]))
