"""The form of a message: everything about an activation, or about gradients, but the bytes of dense tensors.

The structure is pickled, with the number of each tensor in its place. Unpickling can run any code: the ranks of a job
run the same program, and trust each other::

    (x, {"mask": None})  -->  Form(tree=pickle of (0, {"mask": None}), tensors=(Dense(float32, (8, 64)),))  and  [x]
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from microbatch import flatten, is_flat, leaf_paths, unflatten

from ..values._leaves import Activation
from ..values._sharing import parted
from ._tensors import Dense, described

Payload = Activation | list[Tensor | None]


class Form(NamedTuple):
    """The form of a message.

    Attributes:
        tree: the structure of the value, pickled, with sparse tensors as a whole.
        tensors: the description of each tensor; None for those that are in the tree.
    """

    tree: bytes
    tensors: tuple[Dense | None, ...]

    def payload(self, tensors: Sequence[Tensor | None], device: torch.device) -> Any:
        """The message made of ``tensors``, one for each dense one of :attr:`tensors`; others go to ``device``."""
        for tensor, dense in zip(tensors, self.tensors, strict=True):
            if tensor is not None and dense is not None and dense.requires_grad:
                tensor.requires_grad_()
        # Usual ones are not unpickled each time: a tensor, or a list of gradients.
        if self.tree == _flat(None, ()):
            return Activation(tensors[0])
        if self.tree == _list(tuple([each is not None for each in tensors])):
            return list(tensors)
        try:
            found = _Reader(self.tree, tensors, device).load()
        except Exception as error:
            raise ValueError(f"cannot read what another rank has sent: {type(error).__name__}: {error}") from error
        return found if isinstance(found, list) else Activation(found[0], ties=found[1])


def form_of(payload: Payload) -> tuple[Form, list[Tensor | None]]:
    """The form of a message, and its tensors.

    Args:
        payload: an activation, or gradients.

    Returns:
        The form, and the tensors whose bytes are not in it; None for those that are. The ties in the form are those
        after :func:`parted`, since tensors that arrive have memory of their own.

    Raises:
        TypeError: a value cannot be sent; the message names its path, and a way out.
    """
    given: Sequence[Tensor | None] = payload.tensors if isinstance(payload, Activation) else payload
    dense: list[Dense | None] = []
    tensors: list[Tensor | None] = []
    for k, tensor in enumerate(given):
        try:
            form, plain = (None, None) if tensor is None else described(tensor)
        except TypeError as error:
            raise TypeError(f"{_path(payload, k)} {error}") from None
        dense.append(form)
        tensors.append(None if form is None else plain)
    return Form(_tree(payload, given, dense), tuple(dense)), tensors


def _tree(payload: Payload, given: Sequence[Tensor | None], dense: Sequence[Dense | None]) -> bytes:
    """The tree of a message; that of usual ones is looked up."""
    if isinstance(payload, Activation):
        value, ties = payload.value, tuple(parted(payload).ties) if payload.ties else ()
        if is_flat(value) and None not in dense:
            return _flat(len(dense) if type(value) is tuple else None, ties)
        return _written((value, ties), given, payload)
    present = tuple([each is not None for each in given])
    if sum(present) == len(dense) - dense.count(None):
        return _list(present)
    return _written(payload, given, payload)


@lru_cache(maxsize=256)
def _flat(count: int | None, ties: tuple[int, ...]) -> bytes:
    """The tree of a tensor, or of a tuple of ``count`` tensors."""
    value = _Place(0) if count is None else tuple(map(_Place, range(count)))
    return _pickled((value, ties), ())


@lru_cache(maxsize=256)
def _list(present: tuple[bool, ...]) -> bytes:
    """The tree of a list of gradients, some of which may be None."""
    return _pickled([_Place(k) if each else None for k, each in enumerate(present)], ())


class _Place(NamedTuple):
    """Takes the place of a tensor."""

    number: int


class _Writer(pickle.Pickler):
    """Pickles a value, with the numbers of ``tensors`` in their places."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._places: dict[int, list[int]] = {}
        for k, tensor in enumerate(tensors):
            self._places.setdefault(id(tensor), []).append(k)

    def persistent_id(self, value: Any) -> Any:
        if type(value) is _Place:
            return value.number
        if not isinstance(value, Tensor):
            return None
        places = self._places.get(id(value))
        if not places:
            raise TypeError("it holds a tensor that is not one of its leaves")
        number = places[0] if len(places) == 1 else places.pop(0)
        if value.layout is torch.strided:
            return number
        return number, value.requires_grad, pickle.dumps(value.detach().cpu())

    def reducer_override(self, value: Any) -> Any:
        """A tree of torch's is made again of a value that has it: torch does not pickle all of them."""
        if isinstance(value, TreeSpec):
            return _spec_of, (unflatten([0] * value.num_leaves, value),)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Unpickles what a :class:`_Writer` has written, with ``tensors`` in their places."""

    def __init__(self, tree: bytes, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        super().__init__(io.BytesIO(tree))
        self._tensors, self._device = tensors, device

    def persistent_load(self, place: Any) -> Any:
        if isinstance(place, int):
            return self._tensors[place]
        _, requires_grad, data = place
        with torch.device("cpu"):  # whatever the default device is
            tensor = pickle.loads(data)
        return tensor.to(self._device).requires_grad_(requires_grad)


def _spec_of(value: Any) -> TreeSpec:
    return flatten(value)[1]


def _pickled(value: Any, tensors: Sequence[Tensor | None]) -> bytes:
    file = io.BytesIO()
    _Writer(file, tensors).dump(value)
    return file.getvalue()


def _written(value: Any, tensors: Sequence[Tensor | None], payload: Payload) -> bytes:
    try:
        return _pickled(value, tensors)
    except Exception as error:
        raise TypeError(
            f"{_path_of_unpicklable(payload)} cannot be sent to another process, because it cannot be pickled: "
            f"{error}; make it a dataclass at the top of a module, or pass its tensors"
        ) from error


def _path(payload: Payload, number: int) -> str:
    """The path of a tensor, as Python writes it, such as ``output['x'][1]``."""
    if not isinstance(payload, Activation):
        return f"gradient {number}"
    return [path for path, leaf in _leaves(payload) if isinstance(leaf, Tensor)][number]


def _path_of_unpicklable(payload: Payload) -> str:
    if isinstance(payload, Activation):
        for path, leaf in _leaves(payload):
            try:
                _pickled(leaf, [leaf])
            except Exception:
                return path
    return "output"


def _leaves(payload: Activation) -> list[tuple[str, Any]]:
    return list(zip(leaf_paths(payload.value, "output"), flatten(payload.value)[0], strict=True))
