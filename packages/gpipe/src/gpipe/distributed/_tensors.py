"""Tensors as bytes: a description of each, and its data as they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..values._memory import fills
from ._constants import read, written
from ._skeletons import UnkeyedError

Facts = tuple[Any, ...]


class Dense(NamedTuple):
    """A tensor whose elements fill its memory.

    Attributes:
        dtype, shape, requires_grad: those of the tensor.
        stride: the strides of the tensor, which may have its dimensions in any order.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool = False

    @property
    def sizes(self) -> list[int]:
        """Bytes of the data, as a list of one number."""
        return [self.shape.numel() * self.dtype.itemsize]

    def json(self) -> list[Any]:
        stride = None if self.stride == contiguous(self.shape) else list(self.stride)
        return [written(self.dtype)[1], list(self.shape), stride, self.requires_grad]

    def rebuilt(self, data: Iterator[Tensor]) -> Tensor:
        """The tensor, in the memory of the next of ``data``."""
        flat = next(data)
        start = int(flat.storage_offset())
        if start % self.dtype.itemsize:  # torch needs the address of an element to be a multiple of its size
            flat, start = flat.clone(), 0
        tensor = self.within(flat.untyped_storage(), start)
        return tensor.requires_grad_() if self.requires_grad else tensor

    def within(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """The tensor in ``storage``, from byte ``start`` on, which is a multiple of an element's size."""
        # Not as views: these would share a version counter, and refer to the tensor of bytes as their base.
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, start // self.dtype.itemsize, self.shape, self.stride)


class Sparse(NamedTuple):
    """A sparse tensor, sent as its indices and values."""

    layout: torch.layout
    shape: torch.Size
    coalesced: bool
    requires_grad: bool
    parts: tuple[Dense, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the data of each part."""
        return [size for part in self.parts for size in part.sizes]

    def json(self) -> list[Any]:
        parts = [part.json() for part in self.parts]
        return [written(self.layout)[1], list(self.shape), self.coalesced, self.requires_grad, parts]

    def rebuilt(self, data: Iterator[Tensor]) -> Tensor:
        """The tensor, made of the next of ``data``."""
        parts = [part.rebuilt(data) for part in self.parts]
        if self.layout is torch.sparse_coo:
            indices, values = parts
            how: Any = {"is_coalesced": self.coalesced}
            tensor = torch.sparse_coo_tensor(indices, values, self.shape, **how, **_common(values))
        else:
            rows, columns, values = parts
            how = {"layout": self.layout}
            tensor = torch.sparse_compressed_tensor(rows, columns, values, self.shape, **how, **_common(values))
        return tensor.requires_grad_(self.requires_grad)


def _common(values: Tensor) -> dict[str, Any]:
    """The indices are not checked, here or by kernels: on an accelerator a check would wait for the device."""
    return {"device": values.device, "check_invariants": values.device.type == "cpu"}


def facts(tensor: Tensor | None) -> Facts | None:
    """The attributes that determine the :class:`Dense` of a plain tensor, read quickly; None for None.

    Raises:
        UnkeyedError: the tensor is not plain: it is sparse, or of a subclass, for example.
    """
    if tensor is None:
        return None
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or _is_special(tensor):
        raise UnkeyedError
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


_PLAIN = frozenset({Tensor, nn.Parameter})


def _is_special(tensor: Tensor) -> bool:
    """Whether the tensor has more than dense memory, or none."""
    lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return lazy or tensor.is_meta or tensor.is_nested or tensor.is_quantized


def _dense_of(known: Any) -> Dense:
    """The description of the tensor that arrives, if one with these :func:`facts` is sent."""
    dtype, shape, stride, requires_grad = known
    return Dense(dtype, shape, stride if fills(shape, stride) else contiguous(shape), requires_grad)


def bytes_of(tensor: Tensor, size: int) -> Tensor:
    """The data of a dense tensor, without a copy."""
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (size,), (1,))


def parts_of(tensor: Tensor) -> tuple[Dense | Sparse, list[Tensor]]:
    """The description of any tensor, and its data. Raises TypeError if it cannot be sent."""
    try:
        form = _dense_of(facts(tensor))
        return form, [bytes_of(tensor if tensor.stride() == form.stride else laid_out(tensor), *form.sizes)]
    except UnkeyedError:
        return _special_parts(tensor)


def _special_parts(tensor: Tensor) -> tuple[Dense | Sparse, list[Tensor]]:
    _expect_known(tensor)
    if tensor.layout is torch.strided:
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = plain.clone() if plain._is_zerotensor() else plain
        return parts_of(plain.requires_grad_(tensor.requires_grad))
    pieces = [parts_of(piece) for piece in _pieces(tensor.detach())]
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    forms = tuple(form for form, _ in pieces)
    sparse = Sparse(tensor.layout, tensor.shape, coalesced, tensor.requires_grad, forms)  # type: ignore[arg-type]
    return sparse, [data for _, flat in pieces for data in flat]


def laid_out(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _pieces(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _expect_known(tensor: Tensor) -> None:
    kind = type(tensor)
    if kind not in _PLAIN:
        raise TypeError(
            f"is a {kind.__qualname__}, a subclass of torch.Tensor, which is not sent to another process; expected "
            "plain tensors; pass the tensors that it is made of"
        )
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.layout not in _LAYOUTS:
        raise TypeError(
            f"is {_what(tensor)}, which is not sent to another process; expected a dense tensor with data, or a sparse "
            "one; pass the tensors that it is made of"
        )


def _what(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    if tensor.is_nested:
        return "a nested tensor"
    return "a tensor on device meta, without data" if tensor.is_meta else f"a tensor of layout {tensor.layout}"


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_LAYOUTS = (torch.strided, *_SPARSE)


def form_from(json: list[Any]) -> Dense | Sparse:
    """The description whose ``json()`` returned ``json``. Raises ValueError if ``json`` is nothing of the kind."""
    if len(json) == 5:
        layout, shape, coalesced, requires_grad, parts = json
        dense = tuple(map(_dense_from, parts))
        form: Dense | Sparse = Sparse(read(["layout", layout]), _shape(shape), coalesced, requires_grad, dense)
        count = 2 if form[0] is torch.sparse_coo else 3
        _expect_flags(coalesced, requires_grad)
        if form[0] not in _SPARSE or len(dense) != count:
            raise ValueError(f"a tensor of layout {layout} does not have {len(dense)} parts")
        return form
    return _dense_from(json)


def _dense_from(json: list[Any]) -> Dense:
    dtype, sizes, strides, requires_grad = json
    shape = _shape(sizes)
    stride = contiguous(shape) if strides is None else tuple(_shape(strides))
    form = Dense(read(["dtype", dtype]), shape, stride, requires_grad)
    if len(stride) != len(shape) or not fills(shape, stride):
        raise ValueError(f"a tensor of shape {list(shape)} with strides {list(stride)} does not fill its memory")
    _expect_flags(requires_grad)
    if requires_grad and not (form.dtype.is_floating_point or form.dtype.is_complex):
        raise ValueError(f"a tensor of {form.dtype} cannot require grad")
    return form


def _expect_flags(*flags: Any) -> None:
    if not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(f"expected true or false, not {flags}")


def _shape(sizes: list[Any]) -> torch.Size:
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return torch.Size(sizes)


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))
