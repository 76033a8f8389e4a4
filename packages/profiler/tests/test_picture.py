from itertools import accumulate, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .records import profiles
from .strategies import fewer
from .test_table import TWO

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def balanced(draw):
    profile = draw(profiles(timed=st.just(True)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(profile) - 1)), max_size=len(profile) - 1)))
    ends = [0, *cuts, len(profile)]
    return profile, [b - a for a, b in pairwise(ends)]


def parse(text):
    return ElementTree.fromstring(text)


def bars(tree):
    """Those with a title; the samples of the legend have none."""
    return [x for x in tree.iter(f"{SVG}rect") if x.find(f"{SVG}title") is not None]


@fewer
@given(balanced(), st.sampled_from(["seconds", "saved_bytes", "flops", "parameter_bytes"]))
def test_bars_are_as_long_as_costs(pair, by):
    profile, balance = pair
    tree = parse(profile.picture(balance, by=by))
    lengths = [float(bar.get("width")) for bar in bars(tree)]
    if by == "seconds":
        lengths = [forward + backward for forward, backward in zip(lengths[::2], lengths[1::2], strict=True)]
    costs = profile.costs(by)
    scale = max(lengths) / max(costs) if max(costs) else 0
    assert lengths == pytest.approx([cost * scale for cost in costs], abs=0.21)


@fewer
@given(balanced())
def test_a_dashed_line_for_each_cut(pair):
    profile, balance = pair
    tree = parse(profile.picture(balance))
    lines = [x for x in tree.iter(f"{SVG}line") if x.get("stroke-dasharray") != "none"]
    assert len(lines) == len(balance) - 1
    edges = [float(bar.get("y")) for bar in bars(tree)[::2]]
    for line, start in zip(lines, list(accumulate(balance))[:-1], strict=True):
        assert edges[start - 1] < float(line.get("y1")) < edges[start]


@fewer
@given(profiles())
def test_everything_is_inside(profile):
    tree = parse(profile.picture(by="saved_bytes"))
    width, height = float(tree.get("width")), float(tree.get("height"))
    for mark in tree.iter(f"{SVG}rect"):
        if mark.get("x") is not None:
            assert 0 <= float(mark.get("x")) <= float(mark.get("x")) + float(mark.get("width")) <= width
            assert 0 <= float(mark.get("y")) <= float(mark.get("y")) + float(mark.get("height")) <= height


def test_costs_and_loads_are_written_beside_the_bars_and_the_largest_load_is_bold():
    tree = parse(TWO.picture([1, 1]))
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert texts.count("4.50 ms") == texts.count("20.0 µs") == 2
    assert texts.count("conv Conv2d") == 1
    assert [text.text for text in tree.iter(f"{SVG}text") if text.get("font-weight")] == ["4.50 ms"]


@pytest.mark.parametrize("balance", [[1], [3], [2, 0], [1, 1, 1], []])
def test_a_balance_must_fit(balance):
    with pytest.raises(ValueError, match="balance: expected positive numbers that sum up to 2 layers, got"):
        TWO.picture(balance)
