"""What travels from layer to layer: containers, and the kinds of tensors in them.

The first dimension of every tensor is the rows. To a layer that knows nothing of a container it is its leaves in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

WIDTH = 3


class Parts(NamedTuple):
    main: Any
    rest: Any


@dataclass
class Record:
    main: Any
    rest: Any


pytree.register_dataclass(Record)


def _nested(leaves: list[Any]) -> Any:
    return {"first": (leaves[0],), "none": None, "others": [{"leaf": leaf} for leaf in leaves[1:]]}


CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "bare": lambda leaves: leaves[0] if len(leaves) == 1 else tuple(leaves),
    "tuple": tuple,
    "list": list,
    "dict": lambda leaves: {f"leaf {k}": leaf for k, leaf in enumerate(leaves)},
    "ordered dict": lambda leaves: OrderedDict((f"{-k}", leaf) for k, leaf in enumerate(leaves)),
    "named tuple": lambda leaves: Parts(leaves[0], tuple(leaves[1:])),
    "dataclass": lambda leaves: Record(leaves[:1], {"rest": leaves[1:]}),
    "nested": _nested,
}


def packed(container: str, leaves: Iterable[Any]) -> Any:
    """The tensors among ``leaves`` in a new container."""
    return CONTAINERS[container]([leaf for leaf in leaves if leaf is not None])


def floats(value: Any) -> list[int]:
    """The places of the leaves that a layer can compute with: real, and of at least one column."""
    return _where(value, lambda leaf: leaf.is_floating_point() and leaf.dim() > 1 and leaf.numel() > 0)


def complexes(value: Any) -> list[int]:
    return _where(value, lambda leaf: leaf.is_complex() and leaf.dim() > 1)


def tensors(value: Any) -> list[int]:
    return _where(value, lambda leaf: True)


def _where(value: Any, wanted: Callable[[Tensor], bool]) -> list[int]:
    leaves = enumerate(pytree.tree_leaves(value))
    return [place for place, leaf in leaves if isinstance(leaf, Tensor) and wanted(leaf)]


def with_leaf(value: Any, place: int, leaf: Tensor) -> Any:
    """The same container with another leaf in one place."""
    leaves, tree = pytree.tree_flatten(value)
    leaves[place] = leaf
    return pytree.tree_unflatten(leaves, tree)


def _complex(x: Tensor) -> Tensor:
    return torch.complex(x, 0.5 * x) if x.dtype in (torch.float32, torch.float64) else x


MADE: dict[str, Callable[[Tensor], Any]] = {
    "the same": lambda x: x,
    "view": lambda x: x.view_as(x),
    "first column": lambda x: x[..., :1],
    "transposed": lambda x: x.unsqueeze(1).transpose(-1, -2),
    "expanded": lambda x: x[..., :1].expand(*x.shape[:-1], 4),
    "zero-width": lambda x: x[..., :0],
    "stacked": lambda x: torch.stack([x, x.cos()], 1),
    "one number a row": lambda x: x.flatten(1).sum(1),
    "detached": lambda x: x.detach(),
    "constant": lambda x: x.detach().clone(),
    "integers": lambda x: x.detach().argmax(-1),
    "booleans": lambda x: x.detach() > 0,
    "single": lambda x: x.float(),
    "double": lambda x: x.double(),
    "sine": lambda x: x.sin(),
    "complex": _complex,
    "conjugate": lambda x: _complex(x).conj(),
    "imaginary part": lambda x: _complex(x).conj().imag,
}
"""What may be added to a container, made of a leaf that is there. Some share their memory with it."""
