"""Selective checkpointing: a block of a stage saves only its input, and is recomputed.

The graph of a block is a part of the graph of its cell. The tensors that its operations save are dropped when the block
is done. When a backward first needs one of them, the block is recomputed, and the newly saved tensors replace them::

    forward     layer 0   [layer 1, layer 2]   layer 3          tensors saved in [ ] are dropped
    backward    layer 3   recompute [ ], layer 2, layer 1   layer 0

Source: the non-reentrant ``torch.utils.checkpoint``, which does not restore buffers or a pipe's random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from streams import Context

from .._current import current, doing
from .._torch import backward_id
from ..checkpoint._random import CellRNG
from ..values._leaves import Activation, as_nonleaf, detach_leaves, map_once, storage_id, versions
from ._recomputation import Recomputation, Repeat
from ._saved import build_in_place_error
from ._stage import Stage

Compute = Callable[[Any], Any]
"""Computes the layers of a block for a value."""


class Block:
    """A part of a stage in one run that is recomputed on its own.

    Args:
        recomputation: recomputes its layers.
    """

    def __init__(self, stage: Stage, recomputation: Recomputation) -> None:
        self.recomputation = recomputation
        self.recomputation.begin()
        self.stage = stage
        # False once a forward has left its input unchanged.
        self._clones = True

    def forward(self, compute: Compute, value: Any, context: Context) -> tuple[Any, BlockForward]:
        """Return the output of ``compute`` for ``value``, and the object that recomputes it.

        Args:
            context: the settings of the forward, in which it is recomputed.
        """
        inputs = Activation(value)
        before = versions(inputs)
        # Clones of tensors that share memory would not receive each other's changes.
        apart = len(set(map(storage_id, inputs.tensors))) == len(inputs.tensors)
        forward = BlockForward(self, compute, context, current.work.rng)
        # An attention of a tensor with itself does other operations if it is called with copies of it.
        output = forward.forward(value, detach_leaves(inputs, map_once), may_change=self._clones and apart)
        self._clones = self._clones and versions(inputs) != before
        return output, forward


class BlockForward:
    """One forward of a block, and its recomputation. The saved tensors of the graph refer to it."""

    def __init__(self, block: Block, compute: Compute, context: Context, random: CellRNG) -> None:
        self._block = block
        self._compute = compute
        self._context = context
        # Separate generators: the recomputation restarts them, while the cell's generators have advanced.
        self._random = random.fork(block.stage.device)
        self._repeat: Repeat | None = None
        self._thread = get_ident()
        # Weak references, so that a tensor is freed as soon as the operation that saved it has run its backward.
        self._saved: list[ref[_Saved]] = []

    def forward(self, value: Any, inputs: Activation, *, may_change: bool) -> Any:
        """Return the output for ``value``; drop the saved tensors unless the forward cannot be repeated."""
        recomputation = self._block.recomputation
        before = recomputation.before(inputs, may_change=may_change)
        with doing(phase="checkpointing", rng=self._random), saved_tensors_hooks(self._save, _Saved.load):
            outputs = Activation(self._compute(value))
        self._repeat = recomputation.repeat(before, outputs.tensors, self._random)
        if self._repeat is not None:
            # Not during the forward, because a layer may run a backward inside it and use its saved tensors.
            for saved in self._iterate_saved():
                saved.tensor = None
        return outputs.value

    def recompute_early(self) -> None:
        """Recompute the layers now, before a backward needs what they save."""
        if self._repeat is not None and any(saved.tensor is None for saved in self._iterate_saved()):
            self.recompute()

    def recompute(self) -> None:
        """Recompute the layers, and replace the dropped tensors by the newly saved ones."""
        found: list[_Saved] = []

        def save(tensor: Tensor) -> _Saved:
            # A tensor would not do: an operation that saves its output would refer to itself, and keep the graph alive.
            found.append(_Saved(self, tensor))
            return found[-1]

        repeat, block = self._repeat, self._block
        assert repeat is not None
        with self._context.applied(), repeat.restored():
            value = as_nonleaf(repeat.inputs, map_once).value
            # Layers must not draw random numbers in a backward, except in this recomputation.
            work = doing(phase="recomputing", rng=repeat.random, graph_task=backward_id(), skips={})
            # A layer may run a small backward inside its forward.
            with work, saved_tensors_hooks(save, _Saved.load):
                outputs = Activation(self._compute(value))
            # The tolerance depends on autocast, so this is compared inside the context.
            block.recomputation.expect_same(repeat, outputs.tensors)
        # The same operations save the same tensors in the same order, so that tensors match by index.
        if len(found) != len(self._saved):
            raise _build_mismatch_error()
        for reference, fresh in zip(self._saved, found, strict=True):
            saved = reference()
            if saved is not None:
                saved.take(fresh)

    def _iterate_saved(self) -> Iterator[_Saved]:
        return filter(None, (reference() for reference in self._saved))

    def _save(self, tensor: Tensor) -> _Saved:
        if get_ident() != self._thread:
            raise RuntimeError(
                "a layer that is recomputed on its own computes on other threads, as a pipe inside of it does, whose "
                "order may differ in the recomputation; use checkpoint='never' for its partition, or 'always' if the "
                "pipe is of an nn.Sequential"
            )
        saved = _Saved(self, tensor)
        self._saved.append(ref(saved))
        return saved


class _Saved:
    """A tensor that an operation of a block has saved for its backward."""

    __slots__ = ("__weakref__", "_forward", "_kind", "_version", "tensor")

    def __init__(self, forward: BlockForward, tensor: Tensor) -> None:
        self._forward = forward
        self._kind = tensor.shape, tensor.dtype, tensor.device
        self._version = tensor._version
        # Detached, because an operation may save its output, which refers to the graph.
        self.tensor: Tensor | None = tensor.detach()

    def load(self) -> Tensor:
        if self.tensor is None:
            self._forward.recompute()
        assert self.tensor is not None
        if self.tensor._version != self._version:  # torch does not check tensors returned by hooks
            raise build_in_place_error(self._kind[0], "a checkpointed layer")
        return self.tensor

    def take(self, fresh: _Saved) -> None:
        """Store the tensor that the recomputation saved at the same position."""
        if fresh._kind != self._kind:
            raise _build_mismatch_error()
        self.tensor, self._version = fresh.tensor, fresh._version


def _build_mismatch_error() -> RuntimeError:
    return RuntimeError(
        "the recomputation of checkpointed layers did other operations than their forward; they depend on something "
        "that changes from call to call. Keep it in a buffer or an attribute, or do not checkpoint these layers"
    )
