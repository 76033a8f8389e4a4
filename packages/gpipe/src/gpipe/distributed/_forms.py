"""The form of a message: everything about an activation or its gradients except the bytes of dense tensors.

A form is sent only if it differs from the previous message's. Structures are pickled, with an empty tensor for each
tensor. Pickles are safe here, because the ranks of a job run the same program and trust each other::

    (x, {"mask": None})  -->  Form(tree=pickle of (_, {"mask": None}), tensors=(Dense(float32, (8, 64)),))  and  [x]
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import is_flat

from ..values._leaves import Activation, is_dense
from ..values._sharing import as_copied

Payload = Activation | list[Tensor | None]


class Dense(NamedTuple):
    """The properties of a tensor whose elements fill its memory, with its dimensions in any order."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool


class Form(NamedTuple):
    """The form of a message.

    Attributes:
        tree: the structure: None for a list of gradients, -1 for a tensor, n for a tuple of n tensors, and a pickle
            for other values.
        tensors: the properties of each tensor; None for a gradient that is None.
    """

    tree: bytes | int | None
    tensors: tuple[Dense | None, ...]

    @property
    def sizes(self) -> list[int]:
        sizes = [each.shape.numel() * each.dtype.itemsize for each in self.tensors if each is not None]
        return [size for size in sizes if size]

    def empty(self, device: torch.device) -> list[Tensor | None]:
        return [
            each and torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=device)
            for each in self.tensors
        ]

    def payload(self, tensors: Sequence[Any]) -> Any:
        """Return the activation or the gradients with this form and these ``tensors``."""
        for tensor, dense in zip(tensors, self.tensors, strict=True):
            if tensor is not None and dense is not None and dense.requires_grad:
                tensor.requires_grad_()
        if self.tree is None:
            return list(tensors)
        if isinstance(self.tree, int):
            return Activation(tensors[0] if self.tree < 0 else tuple(tensors))
        value, marks = pickle.loads(self.tree)
        return Activation(value, marks=marks).with_tensors(tensors)


def flatten_payload(payload: Payload) -> tuple[Form, list[Tensor | None]]:
    """Return the form of a message, and its dense tensors.

    The marks in the form have passed through :func:`as_copied`, because received tensors have their own memory.
    """
    given: Sequence[Tensor | None] = payload.tensors if isinstance(payload, Activation) else payload
    tensors = [None if each is None else _dense(each) for each in given]
    dense = [
        None if each is None else Dense(each.dtype, each.shape, each.stride(), each.requires_grad) for each in tensors
    ]
    return Form(_tree(payload), tuple(dense)), tensors


def view_as_bytes(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the memory of dense, non-empty tensors as bytes, because some backends do not support all dtypes."""
    # view(-1) would keep the stride of a single element.
    there = [each.detach() for each in tensors if each is not None and each.numel()]
    return [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in there]


def _dense(tensor: Tensor) -> Tensor:
    # The result of an unfinished collective, such as a RowwiseParallel layer returns. Its class is private in torch.
    plain: Any = tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        plain = plain.wait()
    special = plain.is_meta or plain.is_nested or plain.is_quantized or plain.layout is not torch.strided
    if special or type(plain) not in _PLAIN:
        raise TypeError(
            f"a {type(plain).__qualname__} on {plain.device} with {plain.layout} and {plain.dtype} cannot be sent to "
            "another process; expected a dense tensor that is not on meta; pass the tensors that it consists of"
        )
    if plain.is_conj() or plain.is_neg() or plain._is_zerotensor() or not is_dense(plain):
        plain = plain.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    found: Tensor = plain if plain is tensor else plain.requires_grad_(tensor.requires_grad)
    return found


_PLAIN = frozenset({Tensor, nn.Parameter})
_EMPTY = torch.empty(0, device="meta")


def _tree(payload: Payload) -> bytes | int | None:
    if not isinstance(payload, Activation):
        return None
    value, given = payload.value, payload.tensors
    if not payload.marks and is_flat(value) and len(given) == (len(value) if type(value) is tuple else 1):
        return len(value) if type(value) is tuple else -1
    bare = payload.with_tensors(_EMPTY for _ in given)
    try:
        return pickle.dumps((bare.value, tuple(as_copied(payload).marks)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"{type(value).__qualname__} cannot be sent to another process, because it cannot be pickled: {error}; "
            "make it a dataclass at the top level of a module, or pass its tensors"
        ) from error
