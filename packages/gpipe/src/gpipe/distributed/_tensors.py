"""Dense tensors as they lie in memory: a description of each, and its bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..values._memory import fills


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
    def size(self) -> int:
        """The number of bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """The tensor in ``storage``, from byte ``start`` on, which is a multiple of an element's size."""
        # Not as views: these would share a version counter, and refer to the tensor of bytes as their base.
        with torch.inference_mode(False):  # inference tensors could not be written to by runs outside of that mode
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            return tensor.set_(storage, start // self.dtype.itemsize, self.shape, self.stride)

    def empty(self) -> Tensor:
        """Memory for such a tensor, on the host."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def data(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor that is described so; a copy only if its elements do not fill its memory."""
        if tensor.stride() != self.stride:
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return data.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (self.size,), (1,))


def described(tensor: Tensor) -> tuple[Dense, Tensor] | tuple[None, Tensor]:
    """The description of a tensor, with a tensor that has these bytes; None for one that is not dense.

    Raises:
        TypeError: the tensor cannot be sent. The message is the end of a sentence that begins with its path.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or _is_special(tensor):
        _expect_known(tensor)
        if tensor.layout is not torch.strided:
            return None, tensor
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = plain.clone() if plain._is_zerotensor() else plain
        tensor = plain.requires_grad_(tensor.requires_grad)
    return Dense(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad), tensor


def filling(dense: Dense) -> Dense:
    """The description of the tensor that arrives: contiguous, if the elements do not fill the memory here."""
    return dense if fills(dense.shape, dense.stride) else dense._replace(stride=contiguous(dense.shape))


_PLAIN = frozenset({Tensor, nn.Parameter})


def _is_special(tensor: Tensor) -> bool:
    """Whether the tensor has more than dense memory, or none."""
    lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return lazy or tensor.is_meta or tensor.is_nested or tensor.is_quantized


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


_LAYOUTS: Any = (
    *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
)


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))
