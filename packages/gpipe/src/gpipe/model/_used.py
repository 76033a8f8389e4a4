"""Record the outputs of blocks in one forward, and the values of those outputs that the model itself uses.

A model may modify an output in place, as in ``x = block(x); x += residual``. The replay for the full mini-batch repeats
this, so the value before the change is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import flatten

from ..values._by_tensor import ByTensor
from ..values._leaves import version
from ._facts import Answer, Facts, Place, Shape
from ._row_order import Entries, compute_numbers, get_numbered_dims
from ._tensors import Tensors


class _Returned(NamedTuple):
    place: Place
    version: int


class _Use(NamedTuple):
    tensor: Tensor
    version: int
    before: Tensor | None


class Uses:
    """The calls of blocks in one forward, and the uses of their outputs.

    Args:
        model: the name of the model, for errors.
        known: the facts from earlier forwards, if any.
        tensors: the tensors of the current stage.

    Attributes:
        answers: the outputs of blocks, without their tensors.
        changed: the used tensors that the model has modified in place.
        changes_inputs: whether the model has modified its inputs in place.
        orders: the numbers of the entries in arguments of blocks, which show the order of the rows.
    """

    def __init__(self, model: str, known: Facts | None, tensors: Tensors) -> None:
        self.answers: list[Answer] = []
        self.changed: set[Place] = set()
        self.changes_inputs = False
        self.orders: dict[Entries, Tensor] = {}
        self._sizes: set[tuple[torch.Size, ...]] = set()
        self._model, self._known, self._tensors = model, known, tensors
        self._returned = ByTensor[_Returned]()
        self._uses: dict[Place, _Use] = {}
        # The tensors that blocks have modified, or put into lists and dicts, with the name of the block.
        self._altered, self._written = ByTensor[str](), ByTensor[str]()
        self._inputs: list[tuple[Tensor, int]] = []

    def record_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the model, cloned if it modifies them in place, because a replay repeats this."""
        known = self._known
        found = [
            each.clone() if known is None or known.changes_inputs or each.is_inference() else each for each in tensors
        ]
        self._inputs = [(each, version(each)) for each in found]
        return found

    def record_orders(self, tensors: Sequence[Tensor]) -> None:
        """Record numbers that show the order of the rows in the arguments of the next call.

        If the forward is known, this is done only for arguments whose sizes no earlier call had.
        """
        sizes = tuple([tensor.shape for tensor in tensors if get_numbered_dims(tensor)])
        if self._known is not None and sizes in self._sizes:
            return
        self._sizes.add(sizes)
        for k, tensor in enumerate(tensors):
            for dim in get_numbered_dims(tensor):
                self.orders[Entries(len(self.answers), k, dim)] = compute_numbers(tensor, dim)

    def record(self, block: str, output: Any, collected: Any, arguments: Sequence[torch.Size]) -> None:
        """Record the output of ``block``, and the values that hooks inside it have collected."""
        leaves, tree = flatten((output, collected))
        kinds = [
            self._kind(leaf, Place(len(self.answers), k)) if isinstance(leaf, Tensor) else leaf
            for k, leaf in enumerate(leaves)
        ]
        self.answers.append(Answer(block, kinds, tree, arguments))
        if self._known is not None and not self._known.begins_with(self.answers):
            self._known = None  # it differs from earlier forwards, so it runs to its end

    @property
    def is_complete(self) -> bool:
        """True if the last block has been called, according to earlier forwards."""
        return self._known is not None and len(self._known.answers) == len(self.answers)

    def _kind(self, tensor: Tensor, place: Place) -> Shape | Place:
        found, now = self._returned.get(tensor), version(tensor)
        if found is not None and found.version == now:
            return found.place
        if found is None or found.place not in self._uses:
            self._altered.remove(tensor)
        self._returned[tensor] = _Returned(place, now)
        if self._known is not None and place in self._known.used:
            self._use(tensor, place, keeps=place in self._known.changed)
        return Shape(tensor.shape, tensor.dtype)

    def note(self, tensor: Tensor) -> None:
        """Record that the model itself now uses ``tensor``, which a block may have returned."""
        if (block := self._altered.get(tensor)) is not None:
            raise RuntimeError(
                f"{self._model} uses a tensor that block {block!r} has changed in place; the output of the full "
                "mini-batch, computed without calling blocks again, would miss the change; let the block work on a "
                "clone, or give out_spec= or a loss_fn that returns gpipe.LossSum(total, count)"
            )
        if (block := self._written.get(tensor)) is not None:
            raise RuntimeError(
                f"{self._model} uses a tensor that block {block!r} has put into a list or dict that it was called "
                "with; the output of the full mini-batch, computed without calling blocks again, would miss it; let "
                "the block return it, or give out_spec= or a loss_fn that returns gpipe.LossSum(total, count)"
            )
        found = self._returned.get(tensor)
        if found is not None and found.place not in self._uses:
            self._use(tensor, found.place, keeps=self._known is None)

    def _use(self, tensor: Tensor, place: Place, *, keeps: bool) -> None:
        before = None
        if keeps:
            with torch.set_grad_enabled(tensor.requires_grad):  # the model may be in no_grad() now
                here = self._tensors.here
                before = self._tensors.compute(Tensor.clone, (tensor,), {}, here)
        self._uses[place] = _Use(tensor, version(tensor), before)

    def alters(self, block: str, tensor: Tensor) -> None:
        """Record that ``block`` has modified ``tensor``, one of its arguments, in place."""
        self._altered[tensor] = block

    def writes(self, block: str, tensor: Tensor) -> Tensor:
        """Record that ``block`` has put ``tensor`` into one of its arguments. Return what is put there instead.

        It is another object, because the block may also return the tensor, which the model may use.
        """
        with torch.set_grad_enabled(tensor.requires_grad):  # the model may be in no_grad() now
            alias = tensor.view_as(tensor)
        self._written[alias] = block
        return alias

    def collect(self) -> dict[Place, Tensor]:
        """Return the used tensors on the current stage. No uses are recorded afterwards."""
        self.changes_inputs = any(version(each) != before for each, before in self._inputs)
        if self.changes_inputs and self._known is not None and not self._known.changes_inputs:
            raise RuntimeError(
                f"{self._model} changes its input in place, which it did not in the first mini-batch; let it work on a "
                "clone"
            )
        found = {}
        for place, (tensor, before, kept) in self._uses.items():
            is_changed = tensor.is_inference() or version(tensor) != before
            if is_changed:
                self.changed.add(place)
            if is_changed and kept is None:
                raise RuntimeError(
                    f"{self._model} changes an output of block {self.answers[place.call].block!r} in place, which it "
                    "did not in the first mini-batch; let it work on a clone"
                )
            found[place] = self._tensors.here(tensor if kept is None or not is_changed else kept)
        self.orders = {entries: self._tensors.here(numbers) for entries, numbers in self.orders.items()}
        self._returned.clear()
        self._uses.clear()
        self._inputs.clear()
        return found
