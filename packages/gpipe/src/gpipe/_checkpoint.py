"""What a recomputation needs to repeat a forward exactly: the same buffers, parameters and training flags.

The first forward of a checkpointed cell runs like any other and then lets its graph go. It does not run under
``no_grad``: torch chooses other kernels there, and the recomputation would build the graph of a computation that
never happened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

Slot = tuple[nn.Module, str]
"""The place of a buffer: the module that holds it, and its name there."""

Snapshot = list[tuple[Slot, Tensor | None]]
"""Buffers, and copies of what was there; None where there was nothing yet."""

Training = tuple[bool, ...]
"""``training`` of every module of a stage, in order."""


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward whose graph will be rebuilt later."""
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether the calling layer runs in a recomputation. Layers that count or log may want to skip it."""
    return _phase.recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """Inside, :func:`is_checkpointing` is true on this thread."""
    before, _phase.checkpointing = _phase.checkpointing, True
    try:
        yield
    finally:
        _phase.checkpointing = before


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, :func:`is_recomputing` is true on this thread."""
    before, _phase.recomputing = _phase.recomputing, True
    try:
        yield
    finally:
        _phase.recomputing = before


class Buffers:
    """The buffers of a module, and which of them its forward changes, such as the running statistics of batch norm.

    A recomputation works on copies of those as they were before the forward: so it sees what the forward saw, and
    changes nothing twice. Which ones change is found out at the first forward in each training mode, by comparing
    versions and values: the kernel of batch norm does not advance the one, a power iteration may leave the other.

    A layer with a true attribute ``recomputes_without_buffers`` neither reads nor changes its own in a recomputation.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: dict[Training, list[Slot]] = {}

    @contextmanager
    def watched(self, training: Training) -> Iterator[Snapshot]:
        """Around a forward; yields what :meth:`restored` needs, which is complete when the block has ended."""
        known = self._changing.get(training)
        slots = self._slots() if known is None else known
        _expect_born(slots)
        before = [(slot, _copy(slot)) for slot in slots]
        versions = [_version(slot) for slot in slots]
        snapshot: Snapshot = []
        yield snapshot
        if known is not None:
            snapshot += before
            return
        for pair, version in zip(before, versions, strict=True):
            (owner, _), copy = pair
            # Batch norm is taken at its word: a mini-batch may happen to leave its statistics as they were.
            if isinstance(owner, _NormBase) or _version(pair[0]) != version or not _same(_buffer(pair[0]), copy):
                snapshot.append(pair)
        born = [slot for slot in self._slots() if slot not in slots]
        if not born:  # else look again next time, at them too
            self._changing[training] = [slot for slot, _ in snapshot]
        snapshot += [(slot, None) for slot in born]

    def _slots(self) -> list[Slot]:
        return [
            (owner, name)
            for owner in self._module.modules()
            if owner._buffers and not _ignored(owner)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]


@contextmanager
def restored(snapshot: Snapshot) -> Iterator[None]:
    """Around a recomputation: the buffers that a forward changed are as before it, and afterwards as they are now."""
    own = [(slot, _buffer(slot)) for slot, _ in snapshot]
    _put(snapshot)
    try:
        yield
    finally:
        _put(own)


def _ignored(owner: nn.Module) -> bool:
    return getattr(owner, "recomputes_without_buffers", False)


def _expect_born(slots: Sequence[Slot]) -> None:
    for slot in slots:
        owner, buffer = slot[0], _buffer(slot)
        if buffer is not None and is_lazy(buffer):
            raise RuntimeError(
                f"{type(owner).__name__} has not been initialised, so that the first micro-batch could not be computed "
                "again; run the model once before it is trained with checkpointing"
            )


def _buffer(slot: Slot) -> Tensor | None:
    owner, name = slot
    return owner._buffers.get(name)


def _copy(slot: Slot) -> Tensor | None:
    buffer = _buffer(slot)
    return None if buffer is None else buffer.detach().clone()


def _version(slot: Slot) -> int | None:
    buffer = _buffer(slot)
    return None if buffer is None else buffer._version


def _put(snapshot: Snapshot) -> None:
    for (owner, name), buffer in snapshot:
        if buffer is None:
            owner._buffers.pop(name, None)
        else:
            owner._buffers[name] = buffer


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a, b)


class Witness:
    """Remembers what a module was at a forward, and refuses a recomputation that would not see the same.

    After an ``optimizer.step()``, a change of a buffer, or ``train()`` or ``eval()`` in between, the recomputed graph
    would belong to another function, and its gradients be wrong without a word.
    """

    def __init__(self, module: nn.Module, training: Training, snapshot: Snapshot) -> None:
        self._module = module
        self._training = training
        changing = [slot for slot, _ in snapshot]
        self._seen = [
            (own, name, tensor, _state(tensor))
            for owner in module.modules()
            for own in (owner._parameters, owner._buffers)
            if own is owner._parameters or not _ignored(owner)
            for name, tensor in own.items()
            if tensor is not None and (own is owner._parameters or (owner, name) not in changing)
        ]

    def check(self) -> None:
        """Raise RuntimeError naming what has changed since, if anything has."""
        if training_flags(self._module) != self._training:
            raise RuntimeError(
                "train() or eval() was called between the forward and the backward of a checkpointed run, whose "
                "recomputation would now compute something else; call it after backward(), or use checkpoint='never'"
            )
        changed = [t for own, name, t, state in self._seen if own.get(name) is not t or _state(t) != state]
        if changed:
            raise RuntimeError(
                f"{self._names(changed)} changed between the forward and the backward of a checkpointed run, whose "
                "recomputation would now compute something else; change it after backward() (optimizer.step() comes "
                "last), or use checkpoint='never'"
            )

    def _names(self, tensors: Sequence[Tensor]) -> str:
        missing = [id(tensor) for tensor in tensors]
        places = [
            (f"{prefix}.{name}".lstrip("."), id(own.get(name)), id(tensor))
            for prefix, owner in self._module.named_modules()
            for own, name, tensor, _ in self._seen
            if own is owner._parameters or own is owner._buffers
        ]
        return ", ".join(repr(name) for name, _, seen in places if seen in missing)


def _state(tensor: Tensor) -> tuple[int, int, bool]:
    """Changes whenever the tensor is changed in place, given other memory by ``.data``, frozen or thawed."""
    memory = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return tensor._version, memory, tensor.requires_grad


def training_flags(module: nn.Module) -> Training:
    """``training`` of every module, ``module`` itself first."""
    return tuple([m.training for m in module.modules()])
