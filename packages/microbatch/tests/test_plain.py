"""Unregistered dataclasses and mappings, beyond the general tests with :mod:`strategies`."""

from collections import UserDict
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch

from microbatch import Batch, Replicate, Split, gather, scatter

from .strategies import Encoding

x = torch.arange(12.0).view(4, 3)


@dataclass
class Plain:
    words: Any
    mask: Any = None


@dataclass
class Derived:
    words: Any
    length: Any = field(init=False)
    how: InitVar[str] = ""

    def __post_init__(self, how: str) -> None:
        self.length = self.words.sum(1)
        self.words = self.words * 2


def test_constructor_is_not_run_again() -> None:
    a, b = scatter(Derived(x), 2)
    assert a.value.length.tolist() == [3, 12]
    assert a.value.words.tolist() == (2 * x[:2]).tolist()
    assert gather([a, b]).words.tolist() == (2 * x).tolist()


def test_paths_and_specs_go_by_name() -> None:
    with pytest.raises(TypeError, match=r"^input\[0\]\.mask\['n'\] is of type int"):
        scatter((Plain(x, Encoding({"n": 3})),), 2)
    spec = (Plain(Split(1), {"n": Replicate()}),)
    (a, _) = scatter((Plain(x, Encoding({"n": 3})),), 2, spec)
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
    with pytest.raises(
        TypeError, match=rf"^a {kind} cannot be rebuilt from its parts \S+, \S+: .*register_pytree_node"
    ):
        scatter(value, 2)


def test_replicated_ones_agree_by_what_is_in_them() -> None:
    spec = {"x": None, "config": Replicate()}
    parts = [Batch({"x": x, "config": Plain(torch.tensor([float("nan"), 1]), "text")}) for _ in range(2)]
    assert gather(parts, spec)["config"].words is parts[0].value["config"].words
    parts[1].value["config"].mask = "other"
    with pytest.raises(ValueError, match=r"^output\['config'\]\.mask differs between micro-batches 0 and 1"):
        gather(parts, spec)
