"""Run a model that has no data: shapes, and what depends on what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from streams import DispatchMode, add_note

from ._inputs import Inputs
from ._skeleton import is_placeholder


def has_data(model: nn.Module) -> bool:
    """Whether no parameter or buffer of ``model`` is on ``meta``."""
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def expect_data(model: nn.Module, what: str) -> None:
    """Raise ValueError, saying ``what`` runs it, if ``model`` has no data."""
    if not has_data(model):
        raise ValueError(
            f"{what} runs the model, which is on 'meta' and has no data; give it one with data, such as a few of its "
            "layers, or balance by bytes: gpipe.balance.balance_by_size(..., device='meta')"
        )


class Shapes(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, an operation with a tensor on ``meta`` gives one on ``meta``, and any other is computed.

    So the values of masks and positions, which a forward may look at, are there, though the parameters have none.
    It follows what stand-ins return through all operations: nothing that a model returns may be made of it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._unknown: dict[int, torch.UntypedStorage] = {}  # held, or their addresses would be given out again

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was computed from what a stand-in returned."""
        return is_placeholder(tensor) or tensor.untyped_storage()._cdata in self._unknown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        on_meta = any(tensor.is_meta for tensor in tensors)
        if on_meta:
            args, kwargs = _pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _device(kwargs["device"], on_meta)}
        result = func(*args, **kwargs)
        if any(map(self.is_unknown, tensors)) and not _looks_at_shapes(func):
            self.note(result)
        return result

    def note(self, value: Any) -> None:
        """From here on the tensors in ``value`` are unknown, and what is computed from them."""
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            self._unknown[storage._cdata] = storage


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _device(wanted: Any, on_meta: bool) -> torch.device:
    """What has no data stays on ``meta``, wherever it is moved; and new tensors there would not need to be."""
    if on_meta:
        return torch.device("meta")
    return torch.device("cpu" if torch.device(wanted).type == "meta" else wanted)


def _to_meta(tensor: Tensor) -> Tensor:
    # A tensor of a single number goes with any device.
    return tensor.to("meta") if tensor.dim() else tensor


def _looks_at_shapes(func: Any) -> bool:
    name = getattr(getattr(func, "_overloadpacket", func), "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


@contextmanager
def shapes_only(model: nn.Module) -> Iterator[Shapes | None]:
    """Inside, ``model`` computes shapes, if it has no data."""
    if has_data(model):
        yield None
        return
    try:
        with Shapes() as mode:
            yield mode
    except (RuntimeError, NotImplementedError) as error:
        add_note(
            error,
            f"{type(model).__name__} was run on 'meta', as it has no data; what cannot run there looks at values, or "
            "knows some dtypes only: flatten it in another dtype, or with data",
        )
        raise


def with_values(inputs: Inputs) -> Inputs:
    """``inputs`` with ones in the place of tensors that have no values."""
    leaves, tree = inputs.leaves()
    return Inputs(*tree.value([_ones(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf for leaf in leaves]))


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor, device="cpu")
