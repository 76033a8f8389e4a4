"""Snapshot the state of layers before a checkpointed forward, and restore it for the recomputation.

State is in parameters, buffers and attributes of modules. Small buffers are copied before each checkpointed forward,
and its recomputation uses the copies. If a forward changes any other state, it cannot be repeated, and its graph is
kept. Changes are detected by identity, by data pointer (``.data = ...`` changes it) and by torch's version counters; in
a list or dict, by its last tensor. In-place changes through ``.data`` or ``.numpy()`` are detected by comparing sums of
tensors, in the first forward of a pipe, or in every forward if the environment variable ``GPIPE_CHECK`` is 1. Changes
without such a trace, such as numbers in a list or a closure, are only detected in the outputs
(:mod:`gpipe.checkpoint._compare`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._fsdp import fsdp_modules
from ..values._leaves import version
from ._compare import COMPARABLE

SMALL = 4096
"""The largest size of a buffer that is copied. Kernels and NumPy may modify it without a version change."""


_ABSENT: Final = object()
"""Represents a missing value."""


class State:
    """The places in which the layers below ``root`` keep state; RuntimeError if a module is scripted or traced.

    A layer with a true attribute ``recomputes_without_buffers`` does not use its buffers in a recomputation.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._names: list[str] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[int] = []
        self._dicts: list[dict[str, Any]] = []
        # FSDP's hooks replace the parameters both for a forward and for its recomputation.
        sharded = {module for each in fsdp_modules(root) for module in each.modules()}
        for prefix, module in root.named_modules():
            _expect_readable(prefix, module)
            if module not in sharded:
                self._add(prefix, module._parameters)
            if not getattr(module, "recomputes_without_buffers", False):
                first = len(self._places)
                self._add(prefix, module._buffers)
                self._buffers += range(first, len(self._places))
                # Attributes of torch's own modules are skipped, because reading them would take most of the time.
                if _may_keep(module):
                    self._add(prefix, vars(module), _OF_ANY_MODULE)
        values = [own[name] for own, name in self._places]
        self._containers = [at for at, value in enumerate(values) if isinstance(value, list | dict)]
        self._names += [self._names[at] for at in self._containers]
        # A name added later changes the sizes. Searching for it by name would take longer than all of this.
        self._sizes = [*map(len, self._dicts)]

    def _add(self, prefix: str, values: dict[str, Any], ignored: frozenset[str] = frozenset()) -> None:
        self._dicts.append(values)
        for name in values.keys() - ignored if ignored else values:
            self._places.append((values, name))
            self._names.append(f"{prefix}.{name}".lstrip("."))

    @property
    def is_complete(self) -> bool:
        return self._sizes == [*map(len, self._dicts)]

    def look(self) -> tuple[list[Any], list[int], list[int]]:
        """Return the current values, their versions and their data pointers."""
        # References, so that values stay alive until the recomputation, and no new object can reuse their id.
        values = [own.get(name, _ABSENT) for own, name in self._places]
        ends = [last_entry(values[at]) for at in self._containers]
        values += [end if isinstance(end, Tensor) else None for end in ends]
        return values, _versions(values), _pointers(values)

    def small_buffers(self, values: Sequence[Any]) -> dict[int, Any]:
        """Return copies of the buffers among ``values`` that can be restored, by index."""
        small = [at for at in self._buffers if is_small(values[at])]
        copies = {id(values[at]): _clone(values[at]) for at in small}  # one copy of a buffer that is in two places
        return {at: copies[id(values[at])] for at in small}

    def put(self, values: dict[int, Any]) -> dict[int, Any]:
        """Store ``values`` in their places; return the previous ones."""
        before = {at: self._places[at][0].get(self._places[at][1], _ABSENT) for at in values}
        for at, value in values.items():
            own, name = self._places[at]
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
        return before

    def names(self, numbers: Sequence[int]) -> str:
        """Return the names of the places with these indices, and of places added since."""
        added = [] if self.is_complete else [name for name in State(self._root)._names if name not in self._names]
        return ", ".join(repr(name) for name in [*(self._names[at] for at in numbers), *added])


class Snapshot:
    """The values in the places of ``state`` at one moment, and copies of small buffers.

    Args:
        sums: whether to keep sums of the tensors that are not copied. The host waits for devices to compare them.
    """

    __slots__ = ("_copies", "_pointers", "_state", "_sums", "_values", "_versions")

    def __init__(self, state: State, *, sums: bool = False) -> None:
        self._state = state
        self._values, self._versions, self._pointers = state.look()
        self._copies = state.small_buffers(self._values)
        self._sums = self._compute_sums() if sums else {}

    def find_changes(self) -> str:
        """Return the names of state that has changed since and cannot be restored."""
        values, versions, pointers = self._state.look()
        is_same = versions == self._versions and pointers == self._pointers and all(map(is_, values, self._values))
        # The common case. Comparing values one at a time, and building names, takes several times as long.
        if is_same and not self._sums and self._state.is_complete:
            return ""
        before = zip(self._values, self._versions, self._pointers, strict=True)
        pairs = enumerate(zip(before, zip(values, versions, pointers, strict=True), strict=True))
        changed = [at for at, (a, b) in pairs if at not in self._copies and not _are_alike(a, b)]
        return self._state.names(list(dict.fromkeys([*changed, *self._compare_sums()])))

    def moves(self) -> bool:
        """Return whether sums were kept and have changed. The host waits for devices."""
        return bool(self._compare_sums())

    def _compare_sums(self) -> list[int]:
        now = self._compute_sums() if self._sums else {}
        return [at for at, found in now.items() if not _are_same(found, self._sums.get(at, found))]

    def _compute_sums(self) -> dict[int, Tensor]:
        left = ((at, value) for at, value in enumerate(self._values) if at not in self._copies)
        return {at: _sums(value) for at, value in left if isinstance(value, Tensor) and _is_readable(value)}

    def restored(self) -> AbstractContextManager[None]:
        """Restore the buffers for a recomputation."""
        return self._restored() if self._copies else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        # Copies instead of the current buffers, because the recomputation modifies them again.
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
    """Return the sums of several parts, because reordering the elements would not change the total."""
    data = tensor.detach()
    flat = (torch.view_as_real(data.resolve_conj()) if data.is_complex() else data).flatten()
    wide = torch.float32 if flat.device.type == "mps" else torch.float64
    return torch.stack([part.sum(dtype=wide) for part in flat.chunk(_PARTS)])


def _are_same(a: Tensor, b: Tensor) -> bool:
    # Not torch.equal, by which a nan differs from itself.
    return a.shape == b.shape and a.device == b.device and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def last_entry(value: Any) -> Any:
    """Return the last entry of a list, tuple or dict, which changes if a layer appends; else ``value``."""
    if isinstance(value, list | tuple | dict) and value:
        return value[next(reversed(value))] if isinstance(value, dict) else value[-1]
    return value


def _expect_readable(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            f"{name!r} is a scripted module ({type(module).__name__}), whose state cannot be restored for a "
            "recomputation; use checkpoint='never' for it, or torch.compile instead of torch.jit"
        )


_OF_ANY_MODULE = frozenset([*vars(nn.Module()), "_compiled_call_impl"])
"""The names of attributes that every module has."""

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def _may_keep(module: nn.Module) -> bool:
    """Return whether a forward of ``module`` may change attributes. Torch's modules do not, unless they have hooks."""
    return not type(module).__module__.startswith("torch.nn.modules.") or bool(
        module._forward_hooks or module._forward_pre_hooks
    )


def is_small(buffer: Any) -> bool:
    if not isinstance(buffer, Tensor):
        return True
    # A buffer that requires grad is part of a graph, and a lazy one has no values yet.
    return not (is_lazy(buffer) or buffer.requires_grad) and buffer.numel() <= SMALL


def _versions(values: Iterable[Any]) -> list[int]:
    try:
        return [value._version if isinstance(value, Tensor) else 0 for value in values]
    except RuntimeError:  # inference tensors
        return [version(value) if isinstance(value, Tensor) else 0 for value in values]


def _pointers(values: Iterable[Any]) -> list[int]:
    try:
        return [value.data_ptr() if _has_memory(value) else 0 for value in values]
    except (RuntimeError, ValueError):  # some tensors have no memory of their own, or none yet
        return [_pointer(value) for value in values]


def _has_memory(value: Any) -> bool:
    if not isinstance(value, Tensor) or hasattr(value, "fake_mode"):  # torch warns of the pointer of a fake tensor
        return False
    return not hasattr(value, "_gpipe_is_guest")  # the memory of a guest is freed and allocated again


def _pointer(value: Any) -> int:
    try:
        return value.data_ptr() if _has_memory(value) else 0
    except (RuntimeError, ValueError):
        return 0


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _are_alike(a: tuple[Any, int, int], b: tuple[Any, int, int]) -> bool:
    """Return whether two values, versions and pointers are the same unchanged object, or equal constants."""
    return (a[0] is b[0] and a[1:] == b[1:]) or _are_equal(a[0], b[0])


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether both are equal constants, or lists or partial functions of these.

    A setting that is changed and changed back is often a new object: checkpointing of Hugging Face's models that is
    switched off and on, or an adapter that is chosen again.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, partial):
        return a.func is b.func and _are_equal([*a.args], [*b.args]) and _are_equal(a.keywords, b.keywords)
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    return type(a) in _CONSTANTS and bool(a == b)
