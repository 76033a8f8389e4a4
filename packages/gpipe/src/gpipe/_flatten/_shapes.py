"""Run a model that has no data: shapes, and what depends on what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from streams import add_note

from ..values._leaves import storage_id, tensors_of
from ._inputs import Inputs
from ._placeholders import is_placeholder
from ._sources import Sources, is_whole


def has_data(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def expect_data(model: nn.Module, what: str) -> None:
    if not has_data(model):
        raise ValueError(
            f"{what} runs the model, which is on 'meta' and has no data; give it one with data, such as a few of its "
            "layers, or balance by bytes: gpipe.balance.balance_by_size(..., device='meta')"
        )


class Shapes(Sources):  # type: ignore[no-untyped-call]
    """While it is on, an operation with a tensor on ``meta`` gives one on ``meta``, and any other is computed.

    So the values of masks and positions are there, though the parameters have none. The only source is what a stand-in
    returns: nothing that a model returns may be made of it.
    """

    def _of(self, tensor: Tensor) -> frozenset[Any]:
        return frozenset(["a stand-in"]) if is_placeholder(tensor) else super()._of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.copy_.default and is_whole(args[0]):  # nothing is left of what was there
            self._known[storage_id(args[0])] = args[0], self.of(args[1])
        return result

    def prepared(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        on_meta = any(tensor.is_meta for tensor in tensors_of((args, kwargs)))
        wanted = kwargs.get("device")
        if wanted is not None:
            # What has no data stays on meta, wherever it is moved; and new tensors there would not need to be.
            has_none = torch.device(wanted).type == "meta"
            kwargs = {**kwargs, "device": torch.device("meta" if on_meta else "cpu" if has_none else wanted)}
        if on_meta:
            # A tensor of a single number goes with any device.
            args, kwargs = _pytree.tree_map_only(Tensor, lambda t: t.to("meta") if t.dim() else t, (args, kwargs))
        return args, kwargs


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
    leaves, tree = inputs.leaves()
    found = [torch.ones_like(t, device="cpu") if isinstance(t, Tensor) and t.is_meta else t for t in leaves]
    return Inputs(*tree.value(found))
