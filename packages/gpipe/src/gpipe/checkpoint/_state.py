"""The state of layers before a forward, which its recomputation needs again.

State is in parameters, buffers and attributes of modules. Small buffers are copied before each checkpointed forward,
and its recomputation computes with the copies. A forward that changes anything else cannot be repeated, and keeps its
graph. Changes are found by identity and by torch's count of changes in place; of a list or dict by the tensor at its
end. What leaves no trace there (numbers in a list, a closure) shows only in the outputs
(:mod:`gpipe.checkpoint._compare`); changes through ``.data`` or ``.numpy()``, in sums of what tensors hold, which are
compared once for a pipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._fsdp import fsdp_modules
from ..values._leaves import version
from ._compare import COMPARABLE

SMALL = 4096
"""Elements up to which a buffer is copied: kernels and NumPy may change it without counting, as batch norm does."""


_ABSENT: Final = object()
"""Stands where there is no value."""


class State:
    """The places in which the layers below ``root`` keep state; RuntimeError if a module is scripted or traced.

    A layer with a true attribute ``recomputes_without_buffers`` neither reads nor changes its own in a recomputation.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._names: list[str] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[int] = []
        self._dicts: list[dict[str, Any]] = []
        # FSDP's hooks replace the parameters for a forward, and again for its recomputation.
        sharded = {module for each in fsdp_modules(root) for module in each.modules()}
        for prefix, module in root.named_modules():
            _expect_readable(prefix, module)
            if module not in sharded:
                self._add(prefix, module._parameters)
            if not getattr(module, "recomputes_without_buffers", False):
                first = len(self._places)
                self._add(prefix, module._buffers)
                self._buffers += range(first, len(self._places))
                # Attributes of modules of torch are not looked at, which is most of the time that this would take.
                if _may_keep(module):
                    self._add(prefix, vars(module), _OF_ANY_MODULE)
        values = [own[name] for own, name in self._places]
        self._containers = [at for at, value in enumerate(values) if isinstance(value, list | dict)]
        self._names += [self._names[at] for at in self._containers]
        # A name that is added later shows in the sizes; looking for it by name would take longer than all else.
        self._sizes = [*map(len, self._dicts)]

    def _add(self, prefix: str, values: dict[str, Any], ignored: frozenset[str] = frozenset()) -> None:
        self._dicts.append(values)
        for name in values.keys() - ignored if ignored else values:
            self._places.append((values, name))
            self._names.append(f"{prefix}.{name}".lstrip("."))

    @property
    def is_complete(self) -> bool:
        return self._sizes == [*map(len, self._dicts)]

    def look(self) -> tuple[list[Any], list[int]]:
        """The current values, and the version of each."""
        # By reference: the values stay alive until the recomputation, so that no other object can get their identity.
        values = [own.get(name, _ABSENT) for own, name in self._places]
        ends = [last_entry(values[at]) for at in self._containers]
        values += [end if isinstance(end, Tensor) else None for end in ends]
        return values, _versions(values)

    def small_buffers(self, values: Sequence[Any]) -> dict[int, Any]:
        """Copies of those buffers among ``values`` that can be restored, by number."""
        small = [at for at in self._buffers if _is_small(values[at])]
        copies = {id(values[at]): _copied(values[at]) for at in small}  # one of a buffer that is in two places
        return {at: copies[id(values[at])] for at in small}

    def put(self, values: dict[int, Any]) -> dict[int, Any]:
        """Put ``values`` in their places; return those that were there."""
        before = {at: self._places[at][0].get(self._places[at][1], _ABSENT) for at in values}
        for at, value in values.items():
            own, name = self._places[at]
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
        return before

    def names(self, numbers: Sequence[int]) -> str:
        """The names of places with these numbers, and of those that were added."""
        added = [] if self.is_complete else [name for name in State(self._root)._names if name not in self._names]
        return ", ".join(repr(name) for name in [*(self._names[at] for at in numbers), *added])


class Snapshot:
    """The state in the places of ``state`` at one moment: values, and copies of small buffers."""

    __slots__ = ("_copies", "_state", "_values", "_versions")

    def __init__(self, state: State) -> None:
        self._state = state
        self._values, self._versions = state.look()
        self._copies = state.small_buffers(self._values)

    def changed(self) -> str:
        """The names of what has changed since and cannot be restored."""
        values, versions = self._state.look()
        # Nearly always. Comparing one by one, and making names, takes several times as long.
        if versions == self._versions and all(map(is_, values, self._values)) and self._state.is_complete:
            return ""
        before, now = zip(self._values, self._versions, strict=True), zip(values, versions, strict=True)
        pairs = enumerate(zip(before, now, strict=True))
        return self._state.names([at for at, (a, b) in pairs if at not in self._copies and not _are_alike(a, b)])

    def sums(self) -> dict[int, Tensor]:
        """Sums of what is in tensors that cannot be restored, by number."""
        left = ((at, value) for at, value in enumerate(self._values) if at not in self._copies)
        return {at: _sums(value) for at, value in left if isinstance(value, Tensor) and _is_readable(value)}

    def moved(self, sums: dict[int, Tensor]) -> str:
        """The names of what holds other values than it did at these :meth:`sums`. The host waits for devices."""
        now = self.sums()
        moved = [at for at, before in sums.items() if at in now and not _are_same(now[at], before)]
        return self._state.names(moved) if moved else ""

    def restored(self) -> AbstractContextManager[None]:
        """A context for a recomputation, with the buffers as they were."""
        return self._restored() if self._copies else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        # Copies, and not the buffers themselves, since the recomputation changes them again.
        now = self._state.put(self._copies)
        before = _versions(now.values())
        try:
            yield
        finally:
            self._state.put(now)
        after = _versions(now.values())
        if after != before:
            names = self._state.names([at for at, a, b in zip(now, before, after, strict=True) if a != b])
            raise RuntimeError(
                f"a layer changes the buffer {names} through a list or another attribute that refers to it too, where "
                "its recomputation changes it once more; use the buffer itself, or checkpoint='never'"
            )


_PARTS = 16


def _is_readable(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided or tensor.dtype not in COMPARABLE:
        return False
    return type(tensor.detach()) is Tensor and tensor.numel() > 0  # a subclass decides itself what it does


def _sums(tensor: Tensor) -> Tensor:
    """Of several parts, since a change of order leaves the sum of all as it is."""
    data = tensor.detach()
    flat = (torch.view_as_real(data.resolve_conj()) if data.is_complex() else data).flatten()
    wide = torch.float32 if flat.device.type == "mps" else torch.float64
    return torch.stack([part.sum(dtype=wide) for part in flat.chunk(_PARTS)])


def _are_same(a: Tensor, b: Tensor) -> bool:
    # Not torch.equal, by which a nan differs from itself.
    return a.shape == b.shape and a.device == b.device and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def last_entry(value: Any) -> Any:
    """Of a list, tuple or dict the last entry, which a layer that appends has changed; else ``value``."""
    if isinstance(value, list | tuple | dict) and value:
        return value[next(reversed(value))] if isinstance(value, dict) else value[-1]
    return value


def _expect_readable(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            f"{name!r} is a scripted module ({type(module).__name__}), whose state cannot be restored for a "
            "recomputation; use checkpoint='never' for it, or torch.compile instead of torch.jit"
        )


_OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""The names of attributes that every module has."""

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def _may_keep(module: nn.Module) -> bool:
    """Whether ``module`` may change attributes in its forward. Modules of torch do not, unless they have hooks."""
    return not type(module).__module__.startswith("torch.nn.modules.") or bool(
        module._forward_hooks or module._forward_pre_hooks
    )


def _is_small(buffer: Any) -> bool:
    if not isinstance(buffer, Tensor):
        return True
    # One that requires grad is part of a graph, and a lazy one has no values yet.
    return not (is_lazy(buffer) or buffer.requires_grad) and buffer.numel() <= SMALL


def _versions(values: Iterable[Any]) -> list[int]:
    try:
        return [value._version if isinstance(value, Tensor) else 0 for value in values]
    except RuntimeError:  # inference tensors
        return [version(value) if isinstance(value, Tensor) else 0 for value in values]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _are_alike(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    """Whether two values with their versions are the same object, unchanged, or equal constants."""
    return (a[0] is b[0] and a[1] == b[1]) or (type(a[0]) is type(b[0]) and type(a[0]) in _CONSTANTS and a[0] == b[0])
