"""Stub weights: layers that cannot run on meta tensors have the same costs without a device as on a CPU."""

import pytest
import torch
from torch import nn

from profiler import profile
from profiler.fake import blank_layer, fake_mode
from profiler.sandbox import copied

from .packed import KINDS, Adapted, PackedLinear

WIDTH = 16
FIGURES = (
    "trainable_bytes", "frozen_bytes", "buffer_bytes", "saved_bytes", "output_bytes", "peak_bytes", "flops",
    "passing_bytes", "freed_bytes",
)  # fmt: skip


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_costs_without_device_match_cpu(kind: str, adapted: bool) -> None:
    make, _ = KINDS[kind]
    layers = [Adapted(make(WIDTH), WIDTH) if adapted else make(WIDTH) for _ in range(3)]
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers), torch.randn(5, WIDTH)
    real, fake = (profile(model, x, device=device, timeout=1e-3) for device in ("cpu", "meta"))
    for name in FIGURES:
        assert fake.costs(name) == real.costs(name), name


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_packed_weights(kind: str) -> None:
    make, size = KINDS[kind]
    (found,) = profile(nn.Sequential(make(WIDTH)), torch.randn(5, WIDTH), device="meta")
    beside = 4 + 4 * WIDTH if make is PackedLinear else 0  # a scale and a bias
    assert found.parameter_bytes == size * WIDTH * WIDTH + beside
    assert found.trainable_bytes == 4 * WIDTH * (make is PackedLinear)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_called_once_for_equal_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _ = KINDS[kind]
    calls, forward = list[int](), make.forward
    monkeypatch.setattr(make, "forward", lambda self, x: (calls.append(len(x)), forward(self, x))[1])
    model = nn.Sequential(*(Adapted(make(WIDTH), WIDTH) for _ in range(4)))
    for rows in (3, 5, 3):
        mode = fake_mode()
        copy = blank_layer(model, mode)
        with mode:
            copy(torch.zeros(rows, WIDTH, requires_grad=True))
    # Once to prepare, and once to count.
    assert sorted(calls) == [3, 3, 5, 5]


def test_tensors_that_deepcopy_refuses_are_copied() -> None:
    layer = PackedLinear(WIDTH)
    other = copied(layer)
    assert other.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(other(x), layer(x))
    assert not other.weight.requires_grad
