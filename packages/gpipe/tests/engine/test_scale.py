"""Scaling of gradients: counts on a device have the same effect as numbers, without being read."""

from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, LossSum
from gpipe.engine import _scale
from gpipe.engine._scale import DeviceScale, scale_gradient, scale_in_place

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.fixture
def device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every tensor as a count on a device, and make reading it fail."""
    monkeypatch.setattr(_scale, "_is_elsewhere", lambda count: isinstance(count, Tensor))
    for name in ("__float__", "__bool__", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, read)


def read(self: Tensor) -> Any:
    raise AssertionError("this waits for the device")


@given(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (3, 2)]), st.floats(1e-3, 1e3), st.booleans())
def test_device_factor_multiplies_like_a_number(
    dtype: torch.dtype, shape: tuple[int, ...], factor: float, in_place: bool
) -> None:
    """Property: results are equal in value and dtype, including low precision and 0-dim gradients."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    multiply = scale_in_place if in_place else scale_gradient
    expected = multiply(gradient.clone(), factor)
    found = multiply(gradient.clone(), DeviceScale(torch.tensor(factor, dtype=torch.float64)))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_reads_no_count_of_a_device(schedule: str, hooked: bool, request: pytest.FixtureRequest) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)))
    x = torch.randn(7, 4, dtype=torch.float64)
    total = model(x).square().sum() / 14
    total.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pipe = GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=3)
    if hooked:
        model[0].weight.register_hook(lambda gradient: gradient * 1)
    request.getfixturevalue("device_counts")
    turns = cycle([torch.tensor(2.0), 2, torch.tensor(2, dtype=torch.uint8)])  # some counts are numbers
    loss = pipe.step(x, loss_fn=lambda o, _: LossSum(o.square().sum(), next(turns) * o.shape[0]), schedule=schedule)
    request.getfixturevalue("monkeypatch").undo()
    torch.testing.assert_close([loss, *[p.grad for p in model.parameters()]], [total.detach(), *expected])
