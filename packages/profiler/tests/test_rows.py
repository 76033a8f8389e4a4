"""Profiles at several numbers of rows, and in between."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microbatch import Replicate, Split
from profiler import LayerProfile, Profile, profile

MODEL = nn.Sequential(nn.Linear(6, 30), nn.GELU(), nn.Linear(30, 6))


def affine(rows: int, slope: int, constant: int, others: tuple[Profile, ...] = ()) -> Profile:
    figure = constant + slope * rows
    layer = LayerProfile("a", "Linear", figure / 1000, figure / 500, 7, 8, 9, figure, figure, figure, figure)
    return Profile((layer,), "cpu", "2", 1, chunks=max(1, 64 // rows), rows=rows, rounds=3, loss=layer, others=others)


@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=4, unique=True).map(sorted),
    st.integers(1, 128),
    st.integers(0, 50),
    st.integers(0, 1000),
)
def test_affine_costs_are_exact_at_any_rows(measured, rows, slope, constant):
    *fewer, most = measured
    found = affine(most, slope, constant, tuple(affine(each, slope, constant) for each in fewer)).at(rows)
    expected = affine(rows, slope, constant)
    for one, other in ((found.layers[0], expected.layers[0]), (found.loss, expected.loss)):
        assert one.seconds == pytest.approx(other.seconds)
        assert (one.saved_bytes, one.flops, one.peak_bytes) == (other.saved_bytes, other.flops, other.peak_bytes)
        assert (one.trainable_bytes, one.frozen_bytes, one.buffer_bytes) == (7, 8, 9)
    assert (found.rows, found.others) == (rows, ())


@given(st.lists(st.integers(1, 64), min_size=3, max_size=4, unique=True).map(sorted), st.data())
def test_the_nearest_two_count(measured, data):
    """For a curved cost, every other pair would give a different figure."""
    k = data.draw(st.integers(1, len(measured) - 1))
    rows = data.draw(st.integers(measured[k - 1], measured[k]))
    *fewer, most = [affine(each, 0, each**2) for each in measured]
    between = replace([*fewer, most][k], others=([*fewer, most][k - 1],))
    assert replace(most, others=tuple(fewer)).at(rows).costs("flops") == between.at(rows).costs("flops")


def test_one_number_of_rows_knows_no_other():
    found = affine(8, 1, 0)
    assert found.at(8) == found
    with pytest.raises(
        ValueError, match=r"measured only with 8 rows, got 2; measure two sizes: profile\(..., rows=\[2, 8\]\)"
    ):
        found.at(2)
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        found.at(0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_between_are_those_that_would_be_measured(device):
    found = profile(MODEL, torch.rand(16, 6), rows=[16, 4], device=device, timeout=1e-6)
    assert ([other.rows for other in found.others], found.rows) == ([4], 16)
    for rows in (1, 4, 8, 16):
        counted = profile(MODEL, torch.rand(rows, 6), device="meta")
        for by in ("saved_bytes", "output_bytes", "flops", "parameter_bytes"):
            assert found.at(rows).costs(by) == counted.costs(by)
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"rows": 4}, TypeError, r"rows: expected a list of numbers, got 4; write rows=\[4\]"),
        ({"rows": [4, 4]}, ValueError, "rows: expected distinct numbers of at least 1"),
        ({"rows": [0, 4]}, ValueError, "rows: expected distinct numbers of at least 1"),
        ({"rows": [4, 17]}, ValueError, "rows: expected at most 16, the number of rows of the sample, got 17"),
        ({"rows": [4], "chunks": 2}, ValueError, "rows: expected either rows or chunks"),
    ],
)
def test_other_numbers(arguments, kind, match):
    with pytest.raises(kind, match=match):
        profile(MODEL, torch.rand(16, 6), device="cpu", timeout=1e-6, **arguments)


class First(nn.Module):
    """Needs its mask and flag whole, and rows of x on the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        assert value["flag"] is False
        assert value["mask"].shape == (5,)
        assert value["x"].shape[0] == 3
        return self.linear(value["x"].T)


def sample() -> dict[str, Any]:
    return {"x": Split(torch.ones(3, 8), dim=1), "mask": Replicate(torch.ones(5)), "flag": Replicate(False)}


def model() -> nn.Sequential:
    return nn.Sequential(First(), nn.Tanh())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{}, {"chunks": 4}, {"rows": [2, 4]}])
def test_profiles(device: str, options: dict[str, Any]) -> None:
    found = profile(model(), sample(), device=device, timeout=0.01, **options)
    rows = 4 if "rows" in options else 8 // options.get("chunks", 1)
    assert [layer.output_bytes for layer in found.layers] == [rows * 3 * 4] * 2
