"""Non-tensors are passed to each micro-batch unchanged, and values with rows never are without an error."""

import enum
import re
from collections import UserDict, deque
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe
from gpipe._plan._arguments import expect_target
from microbatch import Replicate, Split

from ..layers import linears, piped, rows


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


class Noting(nn.Module):
    """Records every argument other than ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor, other: Any = None, **more: Any) -> Tensor:
        self.seen.append((len(x), other, more))
        return x


def noting(**options: Any) -> GPipe:
    return GPipe(nn.Sequential(Noting(), *linears()), [2, 2], devices=["cpu"] * 2, chunks=3, **options)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=2)
)
objects = st.sampled_from(
    [Color.RED, Color, torch.float32, torch.device("cpu"), torch.Size([6, 3]), range(6), slice(6), ...,
     np.float32(2)]
)  # fmt: skip
constants = st.recursive(
    leaves | objects,
    lambda each: st.one_of(
        st.lists(each, max_size=3), st.dictionaries(st.text(max_size=2), each, max_size=3), st.tuples(each, each)
    ),
    max_leaves=4,
)


@settings(max_examples=settings.default.max_examples // 2)
@given(constants, constants, st.booleans())
def test_constants_reach_the_first_layer_whole(other: Any, more: Any, inline: bool):
    """They may be positional, keyword arguments, or nested in a value."""
    pipe, plain = noting(), linears()
    x, seen = rows(7), pipe[0].seen
    with gpipe.inline() if inline else closing(pipe):
        output = pipe(x, other, more=more)
        torch.testing.assert_close(output, plain(x))
        output.square().mean().backward()
        pipe.step(x, other=other, more=more, loss_fn=lambda output: output.square().mean())
        pipe.evaluate(**{"x": x, "other": other, "more": more}, loss_fn=lambda output: output.mean())
    # The backward recomputes two micro-batches, and so does the step.
    assert sorted(length for length, _, _ in seen) == sorted([3, 3, 1] * 3 + [3, 3] * 2)
    assert all(same(o, other) and same(m, {"more": more}) for _, o, m in seen)


def same(found: Any, given: Any) -> bool:
    """A torch.Size may be a tuple: torch takes it for one in a tree."""
    return found is given or (isinstance(given, type(found)) and found == given)


class Hiding:
    """An object that is not registered as a pytree node."""

    def __init__(self) -> None:
        self.rows = rows(7)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("value", [list("abcdefg"), tuple(range(7)), [None, "b"] * 3 + [1], [[1], [2, 3]] * 3 + [[]]])
def test_as_many_entries_as_rows_are_refused(value: Any) -> None:
    way = r"entries, one per row of the mini-batch.*convert it to a tensor, wrap it in Replicate\(\)"
    for call in (
        lambda pipe: pipe(rows(7), value),
        lambda pipe: pipe(x=rows(7), other=value),
        lambda pipe: pipe.step(x=rows(7), m={"d": value}, loss_fn=Tensor.mean),
        lambda pipe: pipe(rows(7), UserDict(deep=[3, value])),
    ):
        pipe = noting()
        with pytest.raises(TypeError, match=f"^input has a .* of 7 {way}"):
            call(pipe)
        assert not pipe[0].seen


@pytest.mark.parametrize("make", [list, tuple, deque, lambda leaves: Pair(*leaves)])
def test_containers_of_tensors_may_have_as_many_parts(make: Callable[[list[Tensor]], Any]) -> None:
    pipe = noting()
    torch.testing.assert_close(pipe(rows(2), make([rows(2), rows(2)])), linears()(rows(2)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((7, 3)), "ndarray, which cannot be split by rows; convert it to a tensor, wrap it in Replicate"),
        (Hiding(), "Hiding, "),
        (set(range(7)), "set, "),
    ],
)
def test_rows_that_are_hidden_are_refused(value: Any, message: str) -> None:
    pipe = noting()
    with pytest.raises(TypeError, match=rf"^input\.kwargs\['other'\] is of type {message}"):
        pipe(x=rows(7), other=value)
    assert not pipe[0].seen
    pipe(rows(7), Replicate(value))
    assert all(other is value for _, other, _ in pipe[0].seen)


def test_targets_too():
    seen: list[Any] = []

    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        seen.append(target["kind"])
        return (output - target["y"]).square().mean()

    pipe, plain = piped(linears(), [1, 2], chunks=3), linears()
    loss = pipe.step(rows(7), {"y": rows(7), "kind": Color.RED}, loss_fn=loss_fn, reduction="mean")
    torch.testing.assert_close(loss, loss_fn(plain(rows(7)), {"y": rows(7), "kind": None}).detach())
    assert seen[:3] == [Color.RED] * 3
    with pytest.raises(TypeError, match=r"^target has a list of 7"):
        pipe.step(rows(7), {"y": rows(7), "kind": list("abcdefg")}, loss_fn=loss_fn, reduction="mean")


WRONG_TARGETS: dict[str, Any] = {
    "scalar": torch.tensor(3.0),
    "scalar in a dict": {"y": rows(7), "w": torch.tensor(1.0)},
    "no dimension": {"y": Split(rows(7), dim=2)},
    "numbers": list(range(7)),
    "array": rows(7).numpy(),
    "sparse": rows(7).to_sparse(),
    "sparse in a tuple": (rows(7), rows(7).to_sparse()),
    "packed": nn.utils.rnn.pack_sequence([rows(4), rows(3)]),
    "two rules": Split((rows(7), Replicate(rows(7))), dim=0),
    "counts": Split(rows(7), counts=[3, 3]),
    "other micro-batches": (rows(7), rows(1)),
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_invalid_target_raises_with_remedy(name: str):
    """This applies if it is split; a full-batch loss accepts any target."""
    pipe, target = piped(linears(), [1, 2], chunks=3), WRONG_TARGETS[name]
    for call in (
        lambda: pipe.step(rows(7), target, loss_fn=F.mse_loss, reduction="mean"),
        lambda: pipe.evaluate(rows(7), target, loss_fn=F.mse_loss, reduction="mean"),
        lambda: expect_target(target, rows(7)),
    ):
        with pytest.raises((TypeError, ValueError), match=r"\btarget\b") as caught:
            call()
        assert not re.search(r"^input|\binput\[|\bspec\b", str(caught.value))
