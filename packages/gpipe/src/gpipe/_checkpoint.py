"""What a recomputation needs to repeat a forward exactly: the same buffers, parameters and training flags.

The first forward of a checkpointed cell runs like any other and then lets its graph go. It does not run under
``no_grad``: torch chooses other kernels there, some of which draw other random numbers, and the recomputation would
build the graph of a computation that never happened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Slot = tuple[nn.Module, str]
"""The place of a buffer: the module that holds it, and its name there."""

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
    values: version counters do not tell, because the kernel of batch norm does not advance them.

    A layer with a true attribute ``recomputes_without_buffers`` neither reads nor changes its own in a recomputation.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            (owner, name)
            for owner in module.modules()
            if not getattr(owner, "recomputes_without_buffers", False)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._changing: dict[Training, list[Slot]] = {}

    @contextmanager
    def watched(self, training: Training) -> Iterator[list[Tensor]]:
        """Around a forward; yields the copies for :meth:`restored`, which are complete when the block has ended."""
        known = self._changing.get(training)
        slots = self._slots if known is None else known
        copies = [_buffer(slot).detach().clone() for slot in slots]
        yield copies
        if known is None:
            pairs = [pair for pair in zip(slots, copies, strict=True) if not _same(_buffer(pair[0]), pair[1])]
            self._changing[training] = [slot for slot, _ in pairs]
            copies[:] = [copy for _, copy in pairs]

    @contextmanager
    def restored(self, training: Training, copies: Sequence[Tensor]) -> Iterator[None]:
        """Around a recomputation: ``copies`` stand where the changing buffers were, which stay as they are."""
        slots = self._changing[training]
        own = [_buffer(slot) for slot in slots]
        _put(slots, copies)
        try:
            yield
        finally:
            _put(slots, own)

    def steady(self, training: Training) -> list[Tensor]:
        """The buffers that a forward only reads."""
        changing = self._changing.get(training, [])
        return [_buffer(slot) for slot in self._slots if slot not in changing]


def _buffer(slot: Slot) -> Tensor:
    owner, name = slot
    buffer = owner._buffers[name]
    assert buffer is not None
    return buffer


def _put(slots: Sequence[Slot], buffers: Sequence[Tensor]) -> None:
    for (owner, name), buffer in zip(slots, buffers, strict=True):
        owner._buffers[name] = buffer


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


class Witness:
    """Remembers what a module was at a forward, and refuses a recomputation that would not see the same.

    After an ``optimizer.step()``, a change of a buffer, or ``train()`` or ``eval()`` in between, the recomputed graph
    would belong to another function, and its gradients be wrong without a word.
    """

    def __init__(self, module: nn.Module, training: Training, buffers: Sequence[Tensor]) -> None:
        self._module = module
        self._training = training
        self._tensors = [*module.parameters(), *buffers]
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self) -> None:
        """Raise RuntimeError naming what has changed since, if anything has."""
        if training_flags(self._module) != self._training:
            raise RuntimeError(
                "train() or eval() was called between the forward and the backward of a checkpointed run, whose "
                "recomputation would now compute something else; call it after backward(), or use checkpoint='never'"
            )
        changed = [t for t, version in zip(self._tensors, self._versions, strict=True) if t._version != version]
        if changed:
            raise RuntimeError(
                f"{self._names(changed)} changed in place between the forward and the backward of a checkpointed run, "
                "whose recomputation would now compute something else; change it after backward() "
                "(optimizer.step() comes last), or use checkpoint='never'"
            )

    def _names(self, tensors: Sequence[Tensor]) -> str:
        named = {id(t): name for name, t in (*self._module.named_parameters(), *self._module.named_buffers())}
        return ", ".join(repr(named.get(id(tensor), "a tensor since replaced")) for tensor in tensors[:3])


def training_flags(module: nn.Module) -> Training:
    """``training`` of every module, ``module`` itself first."""
    return tuple([m.training for m in module.modules()])
