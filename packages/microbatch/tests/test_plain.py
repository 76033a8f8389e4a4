"""Dataclasses and mappings that nobody registered."""

from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from microbatch import Batch, Replicate, Split, check, flatten, gather, map_tensors, scatter, scatter_views, unflatten

x = torch.arange(12.0).view(4, 3)


@dataclass
class Sample:
    words: Any
    mask: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    words: Any
    mask: Any


@dataclass
class Derived:
    words: Any
    length: Any = field(init=False)
    how: InitVar[str] = ""

    def __post_init__(self, how: str) -> None:
        self.length = self.words.sum(1)
        self.words = self.words * 2


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding: a mapping with attributes, whose items are attributes too."""

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


MAKERS: list[Any] = [
    lambda a, b: Sample(a, b),
    lambda a, b: Frozen(words=a, mask=b),
    *(lambda a, b, kind=kind: kind({"words": a, "mask": b}) for kind in (Encoding, Lookup, ReadOnly, MappingProxyType)),
    lambda a, b: {"words": a, "mask": b},
]


@st.composite
def values(draw: st.DrawFn) -> Any:
    """A tree of such values and tensors of four rows."""
    leaf = st.sampled_from([x, torch.arange(4), torch.ones(4, 2, requires_grad=True), None])
    branch = st.recursive(
        leaf,
        lambda below: st.one_of(
            st.tuples(below, below),
            st.builds(lambda make, a, b: make(a, b), st.sampled_from(MAKERS), below, below),
        ),
        max_leaves=6,
    )
    return draw(st.sampled_from(MAKERS))(x, draw(branch))


def opened(value: Any) -> Any:
    """What a tree is made of, to compare."""
    if isinstance(value, tuple):
        return tuple(map(opened, value))
    if isinstance(value, Mapping):
        return type(value), {key: opened(each) for key, each in value.items()}
    if isinstance(value, Sample | Frozen):
        return type(value), opened(value.words), opened(value.mask)
    return value if value is None else value.tolist()


@given(values())
def test_flatten_and_unflatten(value: Any) -> None:
    leaves, tree = flatten(value)
    assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
    again = unflatten(leaves, tree)
    assert opened(again) == opened(value)
    assert all(a is b for a, b in zip(flatten(again)[0], leaves, strict=True))
    assert flatten(again)[1] == tree


@given(values(), st.integers(1, 5))
def test_gather_undoes_scatter(value: Any, chunks: int) -> None:
    check(value)
    assert opened(gather(scatter(value, chunks))) == opened(value)
    assert opened(gather(scatter_views(value, chunks)[0])) == opened(value)


@given(values())
def test_a_batch_finds_the_tensors(value: Any) -> None:
    batch = Batch(value)
    assert list(map(id, batch)) == [id(leaf) for leaf in flatten(value)[0] if leaf is not None]
    batch[:] = [tensor * 2 for tensor in batch]
    assert opened(batch.value) == opened(map_tensors(lambda t: t * 2, value))


def test_what_a_constructor_has_done_is_not_done_again() -> None:
    a, b = scatter(Derived(x), 2)
    assert a.value.length.tolist() == [3, 12]
    assert a.value.words.tolist() == (2 * x[:2]).tolist()
    assert gather([a, b]).words.tolist() == (2 * x).tolist()


def test_paths_and_specs_go_by_name() -> None:
    with pytest.raises(TypeError, match=r"^input\[0\]\.mask\['n'\] is of type int"):
        scatter((Sample(x, Encoding({"n": 3})),), 2)
    spec = (Sample(Split(1), {"n": Replicate()}),)
    (a, _) = scatter((Sample(x, Encoding({"n": 3})),), 2, spec)
    assert a.value[0].words.shape == (4, 2)
    assert a.value[0].mask["n"] == 3


class Stubborn(UserDict):  # type: ignore[type-arg]
    def __init__(self, words: Any, mask: Any) -> None:
        super().__init__(words=words, mask=mask)


class Scaling(UserDict):  # type: ignore[type-arg]
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value * 2)


class Upper(UserDict):  # type: ignore[type-arg]
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key.upper() + "!", value)


@pytest.mark.parametrize("value", [Stubborn(x, x), Scaling(words=x, mask=x), Upper(words=x, mask=x)])
def test_what_cannot_be_put_together_says_how_to(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^a {kind} cannot be made of its parts \S+, \S+: .*register_pytree_node"):
        scatter(value, 2)


def test_replicated_ones_agree_by_what_is_in_them() -> None:
    spec = {"x": None, "config": Replicate()}
    parts = [Batch({"x": x, "config": Sample(torch.tensor([float("nan"), 1]), "text")}) for _ in range(2)]
    assert gather(parts, spec)["config"].words is parts[0].value["config"].words
    parts[1].value["config"].mask = "other"
    with pytest.raises(ValueError, match=r"^output\['config'\]\.mask is not the same in micro-batch 1"):
        gather(parts, spec)
