"""`gather` joins micro-batches by the rule that split them, and errors give the path of a mismatch."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from microbatch import Batch, Replicate, Split, gather

from .strategies import Output, Pair

one, two = torch.ones(1, 3), torch.ones(2, 3)
NAN = float("nan")


class Scaled:
    """A registered type with a constant."""

    def __init__(self, x: Any, scale: int) -> None:
        self.x, self.scale = x, scale


pytree.register_pytree_node(Scaled, lambda s: ([s.x], s.scale), lambda leaves, scale: Scaled(*leaves, scale))


def batches(*values: Any) -> list[Batch]:
    return [Batch(value) for value in values]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.cfloat]
)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_autocast_does_not_matter(dtype: torch.dtype, autocast: torch.dtype) -> None:
    a, b = one.to(dtype), two.to(dtype, copy=True).detach().requires_grad_(dtype.is_floating_point)
    with torch.autocast("cpu", autocast):
        whole = gather(batches(a, b))
    torch.testing.assert_close(whole, torch.cat([a, b]))
    if b.requires_grad:
        whole.sum().backward()
        assert b.grad.dtype is dtype


def test_of_replicated_leaves_the_first_is_returned() -> None:
    loss = torch.tensor(1.0, requires_grad=True)
    result = gather(batches((one, loss, 3), (two, torch.tensor(1.0), 3)), (None, Replicate(), Replicate()))
    assert result[1] is loss
    assert result[2] == 3


def constants() -> list[Any]:
    """Return new objects on each call; no two of them are equal."""
    return [
        *map(torch.tensor, ([0.0, 0.0], [0.0], [0, 0], [True], [NAN, 1.0], [NAN, 2.0], [1.0, NAN], complex(NAN, 1))),
        torch.tensor([NAN], dtype=torch.float16),
        *map(np.array, ([NAN, 1.0], [NAN, 2.0], [1, 2], [1, 2, 3])),
        *(0, 1, True, 1.0, float("nan"), complex("nan"), np.float32("nan"), "a", "text", None),
    ]


def test_replicated_leaves_must_be_equal_including_nan() -> None:
    spec = {"x": None, "n": Replicate()}
    for i, first in enumerate(constants()):
        for k, other in enumerate([*constants(), torch.zeros(2, device="meta")]):
            parts = batches({"x": one, "n": [first]}, {"x": one, "n": [other]})
            if i == k:
                gather(parts, spec)
            else:
                with pytest.raises(ValueError, match=r"output\['n'\]\[0\] differs between micro-batches 0 and 1"):
                    gather(parts, spec)


def test_none_is_no_tensor() -> None:
    with pytest.raises(
        TypeError, match=r"output\[1\] is a tensor in micro-batch 0 but of type NoneType in micro-batch 1"
    ):
        gather(batches((one, one), (one, None)))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("value", "path"), [(torch.tensor(1.0), "output"), ({"x": one, "loss": torch.tensor(1.0)}, r"output\['loss'\]")]
)
def test_a_tensor_without_dimensions(value: Any, path: str, count: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{path} has shape \(\) and no dimension 0 to concatenate along; .*Replicate"
    ):
        gather(batches(*[value] * count))


@pytest.mark.parametrize("other", [torch.ones(1, 4), torch.ones(3), torch.ones(0), one.double(), one.to("meta")])
def test_unlike_tensors(other: Tensor) -> None:
    kind = re.escape(f"{tuple(other.shape)} {other.dtype} on {other.device}")
    message = rf"is \(1, 3\) torch.float32 on cpu in micro-batch 0 but {kind} in micro-batch 1; they may differ in rows"
    with pytest.raises(ValueError, match="^output " + message):
        gather(batches(one, other))
    with pytest.raises(ValueError, match=r"^output\[1\] " + message):
        gather(batches((one, one), (one, other)))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((one,), (one, one)),
        ({"a": one}, {"b": one}),
        ({"a": [one]}, {"a": (one,)}),
        ({"a": one, "b": (one,)}, {"b": (one,), "a": one}),
        (Output(a=one), {"a": one}),
        ((one, [Pair(one, one)]), (one, [one])),
        ((), (one,)),
        ((one, (Scaled(one, 2),)), (one, (Scaled(one, 3),))),
        ((one,), one),
        (one, (one,)),
    ],
)
def test_unlike_trees(first: Any, other: Any) -> None:
    gather(batches(first, first))
    with pytest.raises(ValueError, match=r"^micro-batch 2 is unlike micro-batch 0: a "):
        gather(batches(first, first, other))


def test_other_leaves_need_a_spec() -> None:
    with pytest.raises(TypeError, match=r"output\['n'\] is of type int, .*Replicate\(\)"):
        gather(batches({"x": one, "n": 3}))
    with pytest.raises(TypeError, match="output is of type int"):
        gather(batches(3, 3))


def test_a_spec_that_does_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"^spec does not fit output: spec has branches \[0\], output has branches \[0\], \[1\]"
    ):
        gather(batches((one, two)), (None,))
    with pytest.raises(ValueError, match=r"output\[0\] has shape \(1, 3\) and no dimension 2"):
        gather(batches((one,), (one,)), (Split(2),))
