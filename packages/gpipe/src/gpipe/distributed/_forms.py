"""What stages send each other as bytes: a form, which all messages of a kind have in common, and the data of tensors.

The form is JSON, so that nothing which arrives can run code, and need be sent only once for each kind of message::

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
    """The kind of a message: its tree, and of each tensor all but the data. Forms are equal if their texts are.

    Attributes:
        tensors: what there is to say of each; None where there is none.
        text: JSON, the same in every process.
        sizes: bytes of the data of each tensor, in order; a sparse tensor has one for each of its parts, such as
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
        """The form of that text.

        Args:
            text: :attr:`text` of a form, in any process.

        Returns:
            A form with that text.

        Raises:
            ValueError: there is none, or it names a class that is not what it says.
        """
        try:
            form = cls._read(*json.loads(text))
        except ValueError as error:
            raise ValueError(f"cannot read the form of a message: {error}; got {text[:200]}") from error
        except Exception as error:  # nothing of it has been called: it has lists, names or numbers where others belong
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
        """The message, in the memory of what has arrived.

        Args:
            data: for each of :attr:`sizes` a flat uint8 tensor of as many bytes, on any device.

        Returns:
            What :func:`form_of` was given, without its graph: the tensors are leaves.

        Raises:
            ValueError: the data do not fit, or a class cannot be made of its branches.
        """
        self._expect(data)
        arriving = iter(data)
        return self._with(None if each is None else each.rebuilt(arriving) for each in self.tensors)

    def copied(self, tensors: Sequence[Tensor | None], own: Callable[[Tensor], Tensor]) -> Payload:
        """The message made of copies of ``tensors``, which are as the form says but for requiring grad.

        Args:
            tensors: none of them sparse.
            own: copies one.
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
        """Whether no tensor is sparse."""
        return not any(isinstance(each, Sparse) for each in self.tensors)

    def data(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The data of other tensors of this form, none of them sparse."""
        sizes = iter(self.sizes)
        forms: Any = self.tensors
        return [
            bytes_of(tensor if tensor.stride() == dense.stride else laid_out(tensor), next(sizes))
            for tensor, dense in zip(tensors, forms, strict=True)
            if tensor is not None
        ]


_HOLE = object()
"""A leaf where a tensor goes."""

_TENSOR = ["tensor"]


def _is_flat(data: Tensor, size: int) -> bool:
    return data.dtype is torch.uint8 and data.shape == (size,) and data.is_contiguous()


def _how_to_put(leaves: Sequence[Any], spec: Any, ties: Sequence[int]) -> Callable[[tuple[Tensor, ...]], Activation]:
    """How tensors become an activation; a tensor, or a tuple of tensors, without a walk through the tree."""
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

    The forms of tensors, tuples, lists, dicts, named tuples and plain constants are looked up by what distinguishes
    them; those of other trees, of floats and of sparse tensors are written each time.

    Args:
        payload: an activation, or gradients.

    Returns:
        The form, and for each of its sizes a flat uint8 tensor of as many bytes on the device of the tensor: its own
        memory where it is dense, else a copy. The ties in the form are those after :func:`parted`, since what arrives
        has memory of its own.

    Raises:
        TypeError: something in it cannot be sent; names its path, and what can be done.
    """
    form, tensors = dense_form(payload)
    return _written(payload) if form is None else (form, form.data(tensors))


def dense_form(payload: Payload) -> tuple[Form | None, Sequence[Tensor | None]]:
    """The form of a message that can be looked up, and its tensors; None if there is no such form.

    Args:
        payload: as of :func:`form_of`.
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
    form, _ = _written(payload)
    if len(_forms) >= _MOST:  # as where shapes are others each time
        _forms.clear()
    _forms[key] = form
    return form


_forms: dict[Any, Form] = {}
_MOST = 1024


def _written(payload: Payload) -> tuple[Form, list[Tensor]]:
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
