"""A batch: any tree of tensors, with direct access to its tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ._tree import flatten, is_tensors, list_leaves, unflatten

Tensors = tuple[Tensor, ...]
TensorOrTensors = Tensor | Tensors
Function = Callable[[Any], Any]


class Batch:
    """A mini-batch or a micro-batch: a tensor (*atomic*), a tuple of tensors, or a tree of them.

    `.value` is the value as it was passed. Iteration, `len`, indexing and `.tensors` are over the tensors in it, in
    tree order. Nothing is copied or checked.

    `.rows` contains the number of rows in this micro-batch, which `gather` uses to check outputs. It is a tuple,
    because tensors of a mini-batch may have different numbers of rows, but usually has one entry. It is empty if the
    rows are unknown.

    >>> import torch
    >>> Batch(torch.ones(2)).tensor
    tensor([1., 1.])
    >>> batch = Batch({'x': torch.ones(2), 'masks': (torch.zeros(3), None)})
    >>> len(batch), batch[1]
    (2, tensor([0., 0., 0.]))
    """

    __slots__ = ("rows", "value")

    def __init__(self, value: Any, rows: tuple[int, ...] = ()) -> None:
        self.value = value
        self.rows = rows

    @property
    def atomic(self) -> bool:
        """True if the value is a single tensor."""
        return isinstance(self.value, Tensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch. Other batches raise AttributeError."""
        if isinstance(self.value, Tensor):
            return self.value
        raise AttributeError(f"a batch of type {type(self.value).__name__} has no .tensor; use .tensors or .value")

    @property
    def tensors(self) -> Tensors:
        """The tensors of a batch that is not atomic. An atomic batch raises AttributeError."""
        if isinstance(self.value, Tensor):
            raise AttributeError("a batch of one bare tensor has no .tensors; use .tensor or .value")
        return self._tensors()

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        """`.tensor` for an atomic batch, else `.tensors`."""
        return self.value if isinstance(self.value, Tensor) else self._tensors()

    def call(self, function: Function) -> "Batch":
        """Call `function` with the value as its only argument, as nn.Sequential calls a layer.

        Args:
            function: a function of the value, such as a layer.

        Returns:
            A batch of the result, with the rows of this batch.
        """
        return Batch(function(self.value), self.rows)

    def _tensors(self) -> Tensors:
        value = self.value
        if isinstance(value, Tensor):
            return (value,)
        if is_tensors(value):
            return value  # type: ignore[no-any-return]
        return tuple(leaf for leaf in list_leaves(value) if isinstance(leaf, Tensor))

    def __len__(self) -> int:
        return len(self._tensors())

    def __iter__(self) -> Iterator[Tensor]:
        value = self.value
        return iter((value,) if isinstance(value, Tensor) else self._tensors())

    def __getitem__(self, index: int) -> Tensor:
        try:
            return self._tensors()[index]
        except IndexError:
            raise IndexError(f"batch[{index}] is out of range; this batch holds {len(self)} tensors") from None

    def __setitem__(self, index: int | slice, value: Tensor | Sequence[Tensor]) -> None:
        """Replace one tensor with `batch[i] = t`, or all tensors with `batch[:] = ts`, where `ts` is a sequence."""
        tensors: list[Any] = list(self)
        if not isinstance(index, slice):
            _ = self[index]  # raises if it is out of range
            tensors[index] = value
        elif index == slice(None) and isinstance(value, Tensor):
            raise TypeError("batch[:] is set to a tensor; expected a sequence of tensors, as in batch[:] = (t,)")
        elif index == slice(None):
            tensors = list(value)
        else:
            raise NotImplementedError(f"batch[{index}] = ... is not supported; use batch[i] = t or batch[:] = ts")
        for i, each in enumerate(tensors):
            if not isinstance(each, Tensor):
                raise TypeError(f"batch[{i}] is set to a {type(each).__name__}; expected a tensor")
        if is_tensors(self.value):
            self.value = tuple(tensors)  # the length of a plain tuple may change
            return
        if len(tensors) != len(self):
            raise IndexError(f"this batch holds {len(self)} tensors, got {len(tensors)} to replace them; give as many")
        leaves, tree = flatten(self.value)
        fresh = iter(tensors)
        self.value = unflatten([next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)

    def __repr__(self) -> str:
        return f"Batch({self.value!r})"
