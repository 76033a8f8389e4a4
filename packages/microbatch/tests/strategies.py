"""Values that scatter accepts, with their spec, in every kind of tree."""

from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from hypothesis import strategies as st
from torch import Tensor

from microbatch import Replicate, Split, flatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: Any


pytree.register_dataclass(Sample)


class Output(dict):  # type: ignore[type-arg]
    """Registered without the names of its branches, as some libraries do."""


pytree.register_pytree_node(Output, lambda o: (list(o.values()), list(o)), lambda v, k: Output(zip(k, v, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """A frozen dataclass that is not registered as a pytree node, like the classes below."""

    words: Any
    mask: Any


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping whose items are also attributes, like Hugging Face's BatchEncoding."""

    def __init__(self, data: dict[str, Any] | None = None, encoding: Any = None) -> None:
        super().__init__(data)
        self.encoding = encoding

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Lookup(dict):  # type: ignore[type-arg]
    pass


class ReadOnly(Mapping):  # type: ignore[type-arg]
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


UNREGISTERED: list[Any] = [
    lambda a, b: Frozen(words=a, mask=b),
    *(lambda a, b, kind=kind: kind({"words": a, "mask": b}) for kind in (Encoding, Lookup, ReadOnly, MappingProxyType)),
]


class Problem(NamedTuple):
    value: Any
    chunks: int
    spec: Any

    @property
    def leaves(self) -> list[Any]:
        return flatten(self.value)[0]


def count(rows: int, chunks: int) -> int:
    """Return the number of micro-batches: blocks of the rounded-up size, until no rows are left."""
    return -(-rows // -(-rows // chunks)) if rows else chunks


@st.composite
def tensors(draw: st.DrawFn, rows: int, dim: int = 0) -> Tensor:
    shape = draw(st.lists(st.integers(1, 3), min_size=dim, max_size=dim + 1))
    shape.insert(dim, rows)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
    size = torch.Size(shape).numel()
    tensor = (torch.arange(size) % 7).reshape(shape).to(dtype)
    return tensor.requires_grad_(tensor.is_floating_point() and draw(st.booleans()))


@st.composite
def leaves(draw: st.DrawFn, rows: list[int]) -> tuple[Any, Any]:
    """A leaf with its rule."""
    kind = draw(st.sampled_from(["tensor", "tensor", "split", "counted", "none", "object", "whole"]))
    if kind == "tensor":
        return draw(tensors(draw(st.sampled_from(rows)))), None
    if kind == "split":
        dim = draw(st.integers(0, 2))
        return draw(tensors(draw(st.sampled_from(rows)), dim)), Split(dim)
    if kind == "counted":
        dim, samples = draw(st.integers(0, 2)), draw(st.sampled_from(rows))
        counts = draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples))
        form = draw(st.sampled_from([list, torch.tensor, lambda counts: lambda value: counts]))
        return draw(tensors(sum(counts), dim)), Split(dim, counts=form(counts))
    if kind == "none":
        return None, None
    if kind == "object":
        return draw(st.sampled_from([3, 2.5, "causal", True])), Replicate()
    return torch.ones(draw(st.sampled_from([(), (5,)]))), Replicate()


def _trees(children: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
    some = st.lists(children, max_size=3)
    two = st.tuples(children, children)
    branches = st.sampled_from([Pair, Sample, lambda a, b: Output(x=a, y=b), *UNREGISTERED])
    return st.one_of(
        st.builds(lambda kind, p: (kind(v for v, _ in p), kind(s for _, s in p)), st.sampled_from([tuple, list]), some),
        two.map(lambda p: ({"x": p[0][0], "mask": p[1][0]}, {"mask": p[1][1], "x": p[0][1]})),
        st.builds(lambda make, p: (make(p[0][0], p[1][0]), make(p[0][1], p[1][1])), branches, two),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A value that splits into at most `chunks` micro-batches, with the spec that says how."""
    chunks = draw(st.integers(1, 6))
    first = draw(st.integers(0, 9))
    rows = [n for n in range(10) if count(n, chunks) == count(first, chunks)]
    value, spec = draw(st.recursive(leaves(rows), _trees, max_leaves=5))
    # One tensor that is split, wherever the draw went: without any there are no rows.
    anchor = draw(tensors(first))
    return Problem((anchor, value), chunks, (None, spec))


@st.composite
def flat_problems(draw: st.DrawFn) -> Problem:
    """A tensor, or a plain tuple of tensors: what needs neither tree nor spec."""
    chunks = draw(st.integers(1, 6))
    first = draw(st.integers(0, 9))
    rows = [n for n in range(10) if count(n, chunks) == count(first, chunks)]
    if draw(st.booleans()):
        return Problem(draw(tensors(first)), chunks, None)
    many = draw(st.lists(st.sampled_from(rows).flatmap(tensors), min_size=1, max_size=4))
    return Problem(tuple(many), chunks, None)
