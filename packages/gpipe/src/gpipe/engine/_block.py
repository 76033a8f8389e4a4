"""Blocks: consecutive layers of a stage that keep only their input, while its other layers keep what they save.

No pipe has blocks yet. They are for stages that are computed block by block.

The graph of a block is a part of the graph of its cell. The tensors that its operations save are dropped when the block
is done. When a backward first needs one of them, the layers are computed again, and what they save takes its place::

    forward     layer 0   [layer 1, layer 2]   layer 3          what [ ] saves is dropped
    backward    layer 3   [ ] again, layer 2, layer 1   layer 0

Source: the non-reentrant ``torch.utils.checkpoint``, which restores neither buffers nor the random numbers of a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from streams import Context

from .._current import current, doing
from .._torch import backward_id
from ..checkpoint._random import CellRNG
from ..skip.layout import skippables
from ..values._constants import expect_plain
from ..values._leaves import Activation, as_nonleaf, detach_leaves, storage_id, versions
from ._recomputation import Repeat
from ._stage import Stage

Compute = Callable[[Any], Any]
"""Computes the layers of a block for a value."""


class Block:
    """A block of a stage in one run.

    Args:
        numbers: the numbers of the layers among those of the stage.
        context: the settings of the caller of the forward.
    """

    def __init__(self, stage: Stage, numbers: range, context: Context) -> None:
        if stage.module._compiled_call_impl is not None:
            raise RuntimeError(
                f"partition {stage.index} is compiled as a whole, but some of its layers are recomputed on their own; "
                "compile its layers"
            )
        self.numbers = numbers
        self.recomputation = stage.blocks[numbers]
        self.recomputation.begin()
        self.context = context
        self.stage = stage
        layers = [*skippables(self.recomputation.module)]
        self._pops = [key for layer in layers for key in layer.poppable()]
        self._stashes = [key for layer in layers for key in layer.stashable()]
        # Until a forward has shown that it does not change its input in place.
        self._clones = True

    def compute(self, compute: Compute, value: Any) -> Any:
        """The output of ``compute`` for ``value``; computed again in the backward."""
        # Layers of the block may pop skips that were stashed before it. Those that it stashes itself are not there yet.
        store: Any = current.work.skips
        skips = {key: store[key] for key in self._pops if key in store}
        inputs = Activation((value, *skips.values()))
        expect_plain(inputs.value, self.stage.index)
        before = versions(inputs)
        # Separate copies of tensors that share memory would not see each other's changes.
        apart = len(set(map(storage_id, inputs.tensors))) == len(inputs.tensors)
        forward = _Forward(self, compute, current.work.rng, [*skips])
        output = forward.first(value, detach_leaves(inputs), may_change=self._clones and apart)
        self._clones = self._clones and versions(inputs) != before
        return output

    def outputs(self, output: Any) -> Activation:
        store: Any = current.work.skips
        return Activation((output, *[store.get(key) for key in self._stashes]))


class _Forward:
    """One forward of a block, and its recomputation. What the graph has saved refers to it."""

    def __init__(self, block: Block, compute: Compute, random: CellRNG, skips: Sequence[Any]) -> None:
        self._block = block
        self._compute = compute
        self._skips = skips
        # Generators of its own: its recomputation begins them anew, while those of the cell have gone on.
        self._random = random.again(block.stage.device)
        self._repeat: Repeat | None = None
        self._thread = get_ident()
        # Weak, so that a tensor is freed as soon as the backward is done with the operation that saved it.
        self._saved: list[ref[_Saved]] = []

    def first(self, value: Any, inputs: Activation, *, may_change: bool) -> Any:
        """The output for ``value``. What its operations save is dropped, unless the forward cannot be repeated."""
        recomputation = self._block.recomputation
        before = recomputation.before(inputs, may_change=may_change)
        with doing(phase="checkpointing", rng=self._random), saved_tensors_hooks(self._save, _Saved.load):
            outputs = self._block.outputs(self._compute(value))
        self._repeat = recomputation.repeat(before, outputs.tensors, self._random)
        if self._repeat is not None:
            # Not earlier: a layer may use what it saves in a backward of its own, within its forward.
            for saved in filter(None, (reference() for reference in self._saved)):
                saved.tensor = None
        return outputs.value[0]

    def again(self) -> None:
        """Compute the layers again, and replace what was dropped by what their operations save."""
        found: list[_Saved] = []

        def save(tensor: Tensor) -> _Saved:
            # Not the tensor: an operation that saves its output would refer to itself, and keep the whole graph.
            found.append(_Saved(self, tensor))
            return found[-1]

        repeat, block = self._repeat, self._block
        assert repeat is not None
        with block.context.applied(), repeat.restored():
            value, *skips = as_nonleaf(repeat.inputs).value
            own = dict(zip(self._skips, skips, strict=True))
            # This is inside of a backward, where layers must not draw: but here they may.
            work = doing(phase="recomputing", rng=repeat.random, graph_task=backward_id(), skips=own)
            # A layer may have a small backward of its own, within its forward.
            with work, saved_tensors_hooks(save, _Saved.load):
                outputs = block.outputs(self._compute(value))
            # Autocast decides how far values may differ.
            block.recomputation.expect_same(repeat, outputs.tensors)
        # The same operations save the same tensors in the same order, so that the number says which is which.
        if len(found) != len(self._saved):
            raise _saved_others()
        for reference, fresh in zip(self._saved, found, strict=True):
            saved = reference()
            if saved is not None:
                saved.take(fresh)

    def _save(self, tensor: Tensor) -> _Saved:
        if get_ident() != self._thread:
            raise RuntimeError(
                "a layer that is recomputed on its own computes on other threads, as a pipe inside of it does, whose "
                "order may differ in the recomputation; use checkpoint='always' or 'never' for its partition"
            )
        saved = _Saved(self, tensor)
        self._saved.append(ref(saved))
        return saved


class _Saved:
    """A tensor that an operation of a block has saved for its backward."""

    __slots__ = ("__weakref__", "_forward", "_kind", "_version", "tensor")

    def __init__(self, forward: _Forward, tensor: Tensor) -> None:
        self._forward = forward
        self._kind = tensor.shape, tensor.dtype, tensor.device
        self._version = tensor._version
        # Detached, because an operation may save its output, which refers to the graph.
        self.tensor: Tensor | None = tensor.detach()

    def load(self) -> Tensor:
        if self.tensor is None:
            self._forward.again()
        assert self.tensor is not None
        if self.tensor._version != self._version:  # torch does not check what hooks return
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._kind[0])}, which a checkpointed layer needs for its backward; change a "
                "clone instead"
            )
        return self.tensor

    def take(self, fresh: _Saved) -> None:
        """Hold what the recomputation has saved in the same place."""
        if fresh._kind != self._kind:
            raise _saved_others()
        self.tensor, self._version = fresh.tensor, fresh._version


def _saved_others() -> RuntimeError:
    return RuntimeError(
        "the recomputation of checkpointed layers did other operations than their forward; they depend on something "
        "that changes from call to call. Keep it in a buffer or an attribute, or do not checkpoint these layers"
    )
