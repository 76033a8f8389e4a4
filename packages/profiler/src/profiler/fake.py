"""Fake layers and batches, with shapes but no data, to count bytes and FLOPs without a device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from microbatch import Batch, map_tensors
from streams import add_note

from ._stand_in import Known, opaque, stand_in
from .memory import attached, has_memory, held_bytes, is_compressed, is_plain
from .sandbox import iterate_tensors

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FusedAttention", "blank", "blank_batch", "blank_layer", "fake_mode"]

Layer = TypeVar("Layer", bound=nn.Module)
Mode = AbstractContextManager[object]
_NO_MODE: Mode = nullcontext()


def fake_mode() -> FakeTensorMode:
    """Create a fake tensor mode, in which tensors have shapes but no data.

    Returns:
        The mode, a context manager. Layers with real tensors may also be called inside it.
    """
    # Imported late, because it is slow and few calls need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Make layers compute only shapes inside this context. The error of a layer that reads values gets a note."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        with mode, FusedAttention():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        add_note(error, "the layer reads values of tensors, which do not exist without a device; use device='cpu'")
        raise


class FusedAttention(TorchFunctionMode):
    """A mode that computes attention like the fused kernel of an accelerator, which does not store the scores.

    The CPU's kernel stores them if there is dropout, or if values and queries differ in width. (Fake CUDA tensors
    would be simpler, but abort a PyTorch build without CUDA if they require grad.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        # It calls scaled_dot_product_attention internally, where this mode is off.
        if func is functional.multi_head_attention_forward and not kwargs.get("need_weights", True):
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
        return func(*args, **kwargs)


_DROPOUT = [*signature(functional.multi_head_attention_forward).parameters].index("dropout_p")


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **kwargs: Any
) -> Any:
    width = value.shape[-1]
    wide = functional.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    return functional.scaled_dot_product_attention(query, key, wide, attn_mask, 0.0, *rest, **kwargs)[..., :width]


def blank(x: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Create a tensor of zeros like `x` on the CPU.

    Args:
        x: a tensor on any device.
        mode: the mode that creates the tensor. In a fake mode it needs no memory.

    Returns:
        A tensor of the same shape, strides, dtype and ``requires_grad``; a parameter if `x` is one. It is dense if `x`
        is sparse.
    """
    with mode:
        # Keep the strides, because a kernel that needs a different layout would save a copy.
        y = torch.empty_strided(x.shape, _strides(x), dtype=x.dtype, device="cpu").zero_()
        if isinstance(x, nn.Parameter):
            return nn.Parameter(y, requires_grad=x.requires_grad)
        return y.requires_grad_(x.requires_grad)


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape, device="meta").stride() if is_compressed(x) else x.stride()


def blank_layer(layer: Layer, mode: Mode = _NO_MODE) -> Layer:
    """Copy a layer with blank tensors.

    A layer with weights of a tensor subclass, which cannot compute without data, is called on zeros on the CPU instead.

    Args:
        layer: the layer, which does not change.
        mode: as for :func:`blank`.

    Returns:
        The copy, in training mode.
    """
    made: dict[int, Any] = {}
    at: dict[Any, torch.Tensor] = {}  # by memory: a packed weight may be in several places
    for kind, found in (
        (_blank_subclass, iterate_tensors(layer)),
        (blank, chain.from_iterable(map(attached, layer.modules()))),
    ):
        for x in found:
            if id(x) in made:
                continue
            memory = _memory(x)
            made[id(x)] = _alias(at[memory], x, mode) if memory in at else kind(x, mode)
            at.setdefault(memory, made[id(x)])
    unable = list(opaque(layer))
    copied = copy.deepcopy(layer, made).train()
    for each in unable:
        stand_in(made[id(each)], each, _KNOWN.setdefault(layer, {}))
    return copied


_KNOWN: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


def _memory(x: torch.Tensor) -> Any:
    """Identify the memory of ``x`` and its layout there, while ``x`` exists."""
    if x.layout is not torch.strided or is_lazy(x) or not has_memory(x):
        return id(x)
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


def _alias(made: torch.Tensor, x: torch.Tensor, mode: Mode) -> torch.Tensor:
    """A tensor with the memory of ``made``; a parameter if ``x`` is one."""
    with mode:
        if isinstance(x, nn.Parameter):
            return nn.Parameter(made.detach(), requires_grad=x.requires_grad)
        return made.detach().requires_grad_(x.requires_grad)


def _blank_subclass(x: torch.Tensor, mode: Mode) -> torch.Tensor:
    """A plain tensor in place of ``x``, which may hold its values in another form, and less memory than its shape."""
    if x.requires_grad or x.layout is not torch.strided or is_plain(x) or held_bytes([x]) >= x.nbytes:
        return blank(x, mode)
    with mode:
        bare = torch.zeros((), dtype=x.dtype).expand(x.shape)
        return nn.Parameter(bare, requires_grad=False) if isinstance(x, nn.Parameter) else bare


def blank_batch(batch: Batch, mode: Mode = _NO_MODE) -> Batch:
    """Copy a batch with blank tensors.

    Args:
        batch: the batch, which does not change.
        mode: as for :func:`blank`.

    Returns:
        A batch with the same rows.
    """
    return batch.call(lambda value: map_tensors(lambda x: blank(x, mode), value))
