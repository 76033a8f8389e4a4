"""Activations and gradients as bytes: a form, which all messages of a kind share, and the data of the tensors.

The form is JSON, so nothing that arrives can run code. It is sent only once for each kind of message::

    (x, {"mask": None}) --> ["activation", [["float32", [8, 64], null, true]], [],
                             ["tuple", [["tensor"], ["dict", ["mask"], [null]]]]]   and 2048 bytes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from microbatch import flatten, unflatten

from ..values._leaves import Activation
from ..values._sharing import parted
from ._notes import read_leaf, written_leaf
from ._skeletons import UnkeyedError, skeleton
from ._tensors import Dense, Sparse, bytes_of, facts, form_from, laid_out, parts_of
from ._trees import UnwrittenError, path_of, read_tree, written_tree

Payload = Activation | list[Tensor | None]


class Form:
    """The form of a message: its tree, and everything about its tensors but the data. Equal if ``text`` is equal.

    Attributes:
        tensors: the description of each tensor; None where there is no tensor.
        text: the form as JSON, the same in every process.
        sizes: bytes of the data of each tensor, in order. A sparse tensor has one for each of its parts, such as
            indices and values.
    """

    __slots__ = ("_hash", "_put", "sizes", "tensors", "text")

    def __init__(self, tensors: Sequence[Dense | Sparse | None], kind: str, *details: Any, put: Any = None) -> None:
        self.tensors = tensors
        self._put: Callable[[Any], Payload] | None = put
        self.sizes = tuple([size for tensor in tensors if tensor is not None for size in tensor.sizes])
        message = [kind, [None if each is None else each.json() for each in tensors], *details]
        self.text = json.dumps(message, separators=(",", ":"), allow_nan=False)
        self._hash = hash(self.text)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self.text == other.text)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Form.parse({self.text!r})"

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form with that text.

        Args:
            text: :attr:`text` of a form, in any process.

        Returns:
            A form with that text.

        Raises:
            ValueError: ``text`` is no form, or names a class that is not of the kind that it says.
        """
        try:
            form = cls._read(*json.loads(text))
        except ValueError as error:
            raise ValueError(f"cannot read the form of a message: {error}; got {text[:200]}") from error
        except Exception as error:  # nothing of the form has been called: lists, names or numbers are in wrong places
            raise ValueError(
                f"cannot read the form of a message: it is not built like one; got {text[:200]}"
            ) from error
        if form.text != text:
            raise ValueError(f"expected the form of a message as {form.text[:200]}; got {text[:200]}")
        return form

    @classmethod
    def _read(cls, kind: str, tensors: list[Any], ties: Sequence[int] = (), tree: Any = None) -> Form:
        if kind == "gradients":
            return cls([None if each is None else form_from(each) for each in tensors], kind, put=list)
        known = [form_from(each) for each in tensors]
        leaves: list[Any] = []
        spec = read_tree(tree, lambda leaf: _HOLE if leaf == _TENSOR else read_leaf(leaf), leaves)
        if sum(leaf is _HOLE for leaf in leaves) != len(known) or len(ties) not in (0, len(known)):
            raise ValueError(f"{len(known)} tensors do not fit the tree, or their ties")
        if kind != "activation" or not all(type(tie) is int for tie in ties):
            raise ValueError(f"{kind!r} with ties {ties} is no message")
        again = written_tree(spec, iter([_TENSOR if leaf is _HOLE else written_leaf(leaf) for leaf in leaves]))
        return cls(known, kind, ties, again, put=_how_to_put(leaves, spec, tuple(ties)))

    def rebuild(self, data: Sequence[Tensor]) -> Payload:
        """The message, whose tensors use the memory of ``data``.

        Args:
            data: for each of :attr:`sizes` a flat uint8 tensor of that many bytes, on any device.

        Returns:
            The payload that :func:`form_of` was given. Its tensors are leaves.

        Raises:
            ValueError: ``data`` do not fit, or a class cannot be made from its fields.
        """
        self._expect(data)
        arriving = iter(data)
        return self._with(None if each is None else each.rebuilt(arriving) for each in self.tensors)

    def copied(self, tensors: Sequence[Tensor | None], own: Callable[[Tensor], Tensor]) -> Payload:
        """The message made of copies of ``tensors``.

        Args:
            tensors: tensors that the form describes, but for ``requires_grad``; none of them sparse.
            own: a function that copies a tensor.
        """
        return self._with(
            own(tensor).requires_grad_(each.requires_grad) if tensor is not None and each is not None else None
            for tensor, each in zip(tensors, self.tensors, strict=True)
        )

    def _with(self, tensors: Iterable[Any]) -> Payload:
        put = self._put or self._putting()
        try:
            return put(tuple(tensors))
        except Exception as error:
            raise ValueError(f"cannot put a message together: {error}; its form is {self.text[:200]}") from error

    def _putting(self) -> Callable[[Any], Payload]:
        self._put = Form.parse(self.text)._put
        assert self._put is not None
        return self._put

    def _expect(self, data: Sequence[Tensor]) -> None:
        if len(data) != len(self.sizes) or not all(map(_is_flat, data, self.sizes)):
            got = ", ".join(f"{each.dtype} of shape {list(each.shape)}" for each in data)
            raise ValueError(f"expected flat contiguous uint8 tensors of {list(self.sizes)} bytes; got {got}")

    @property
    def is_dense(self) -> bool:
        """Whether the form has no sparse tensor."""
        return not any(isinstance(each, Sparse) for each in self.tensors)

    def data(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The data of ``tensors``, which have this form and are not sparse."""
        sizes = iter(self.sizes)
        forms: Any = self.tensors
        return [
            bytes_of(tensor if tensor.stride() == dense.stride else laid_out(tensor), next(sizes))
            for tensor, dense in zip(tensors, forms, strict=True)
            if tensor is not None
        ]


_HOLE = object()
"""Takes the place of a tensor among the leaves."""

_TENSOR = ["tensor"]


def _is_flat(data: Tensor, size: int) -> bool:
    return data.dtype is torch.uint8 and data.shape == (size,) and data.is_contiguous()


def _how_to_put(leaves: Sequence[Any], spec: Any, ties: Sequence[int]) -> Callable[[tuple[Tensor, ...]], Activation]:
    """A function that makes an activation of tensors: of a tensor, or a tuple of tensors, without walking a tree."""
    whole = all(leaf is _HOLE for leaf in leaves)
    if whole and spec.is_leaf():
        return lambda tensors: Activation(tensors[0], tensors, ties)
    if whole and spec.type is tuple and all(child.is_leaf() for child in spec.children()):
        return lambda tensors: Activation(tensors, tensors, ties)

    def put(tensors: tuple[Tensor, ...]) -> Activation:
        arriving = iter(tensors)
        value = unflatten([next(arriving) if leaf is _HOLE else leaf for leaf in leaves], spec)
        return Activation(value, tensors, ties)

    return put


def form_of(payload: Payload) -> tuple[Form, list[Tensor]]:
    """The form of a message, and its data.

    Forms that contain only tensors, tuples, lists, dicts, named tuples and plain constants are looked up in a table;
    those of other trees, of floats and of sparse tensors are made each time.

    Args:
        payload: an activation, or gradients.

    Returns:
        The form, and for each of its sizes a flat uint8 tensor of that many bytes on the device of the tensor: the
            memory
        of the tensor where it is dense, else a copy. The ties in the form are those after :func:`parted`, since tensors
        that arrive have memory of their own.

    Raises:
        TypeError: a value cannot be sent; the message names its path, and a way out.
    """
    form, tensors = dense_form(payload)
    return written_form(payload) if form is None else (form, form.data(tensors))


def dense_form(payload: Payload) -> tuple[Form | None, Sequence[Tensor | None]]:
    """The form of a message from the table, and its tensors; None for the form if such forms are not in the table.

    Args:
        payload: an activation, or gradients.
    """
    tensors: Sequence[Tensor | None] = payload.tensors if isinstance(payload, Activation) else payload
    try:
        if isinstance(payload, Activation):
            key: Any = (skeleton(payload.value), (*payload.ties,), *map(facts, tensors))
        else:
            key = (list, *map(facts, tensors))
    except UnkeyedError:
        return None, ()
    form = _forms.get(key)
    return (_remembered(key, payload) if form is None else form), tensors


def _remembered(key: Any, payload: Payload) -> Form:
    form, _ = written_form(payload)
    if len(_forms) >= _MOST:  # such as where shapes differ each time
        _forms.clear()
    _forms[key] = form
    return form


_forms: dict[Any, Form] = {}
_MOST = 1024


def written_form(payload: Payload) -> tuple[Form, list[Tensor]]:
    """As :func:`form_of`, without looking the form up."""
    try:
        return _of_activation(payload) if isinstance(payload, Activation) else _of_gradients(payload)
    except UnwrittenError as error:
        raise TypeError(f"{path_of(error)} {error}") from error.__cause__


def _of_gradients(gradients: Sequence[Tensor | None]) -> tuple[Form, list[Tensor]]:
    known: list[Dense | Sparse | None] = []
    data: list[Tensor] = []
    for k, gradient in enumerate(gradients):
        try:
            tensor, parts = (None, []) if gradient is None else parts_of(gradient)
        except TypeError as error:
            raise TypeError(f"gradient {k} {error}") from None
        known.append(tensor)
        data += parts
    return Form(known, "gradients", put=list), data


def _of_activation(activation: Activation) -> tuple[Form, list[Tensor]]:
    known: list[Dense | Sparse] = []
    data: list[Tensor] = []

    def each(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return written_leaf(leaf)
        tensor, parts = parts_of(leaf)
        known.append(tensor)
        data.extend(parts)
        return _TENSOR

    leaves, spec = flatten(activation.value)
    tree = written_tree(spec, map(each, leaves))
    return Form(known, "activation", [*parted(activation).ties], tree), data
