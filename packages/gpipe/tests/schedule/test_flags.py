"""Flags follow their layers, modes stay with their stages, and what schedules see of either."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import CHECKPOINT_MODES
from gpipe.schedule._flags import (
    StageMode,
    as_lists,
    expect_flags,
    mode_of,
    moved,
    runs_of,
    scheduled,
)

from ..module.test_rebalance import balances

Case = tuple[list[StageMode], list[int], list[int]]
some_flags = st.lists(st.booleans(), min_size=1, max_size=9)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Modes or flags of stages, the sizes that they have, and others."""
    layers = draw(st.integers(2, 7))
    stages = draw(st.integers(1, min(layers, 4)))
    before, after = draw(balances(layers, stages)), draw(balances(layers, stages))
    flags = {size: st.lists(st.booleans(), min_size=size, max_size=size).map(tuple) for size in before}
    return [draw(st.sampled_from(CHECKPOINT_MODES) | flags[size]) for size in before], before, after


def flags_of(mode: StageMode, size: int) -> list[bool]:
    return [mode != "never"] * size if isinstance(mode, str) else list(mode)


def owners(sizes: list[int]) -> list[int]:
    """The stage of each layer."""
    return [j for j, size in enumerate(sizes) for _ in range(size)]


@given(cases())
def test_flags_follow_their_layers_and_modes_stay_with_their_stages(case: Case) -> None:
    modes, before, after = case
    came = [flag for mode, size in zip(modes, before, strict=True) for flag in flags_of(mode, size)]
    found = moved(modes, before, after)
    here = [flag for mode, size in zip(found, after, strict=True) for flag in flags_of(mode, size)]
    for k, (old, new) in enumerate(zip(owners(before), owners(after), strict=True)):
        follows = not isinstance(modes[old], str) or not isinstance(modes[new], str)
        assert here[k] == (came[k] if follows else modes[new] != "never")
    for j, mode in enumerate(modes):
        if all(isinstance(modes[i], str) for i in {j, *(owners(before)[k] for k in held(after, j))}):
            assert found[j] == mode


def held(sizes: list[int], stage: int) -> list[int]:
    """The layers of a stage."""
    return [k for k, j in enumerate(owners(sizes)) if j == stage]


@given(cases())
def test_to_the_same_sizes_nothing_changes(case: Case) -> None:
    modes, before, _ = case
    assert moved(modes, before, before) == [mode if isinstance(mode, str) else mode_of(mode) for mode in modes]


@given(some_flags)
def test_a_mode_says_what_the_flags_say(flags: list[bool]) -> None:
    mode = mode_of(flags)
    assert flags_of(mode, len(flags)) == flags
    assert isinstance(mode, str) == (len(set(flags)) == 1)
    assert scheduled(mode) == scheduled(flags)
    assert as_lists([mode]) == [mode if isinstance(mode, str) else flags]


@given(some_flags)
def test_runs_cover_all_layers_and_differ_from_the_next(flags: list[bool]) -> None:
    runs = list(runs_of(flags))
    assert [flag for flag, first, end in runs for _ in range(first, end)] == flags
    assert [end for _, _, end in runs] == list(accumulate(end - first for _, first, end in runs))
    assert all(a[0] != b[0] for a, b in pairwise(runs))


def test_what_is_no_flag_is_named() -> None:
    with pytest.raises(TypeError, match=r"checkpoint\[1\]\[2\] must be True or False.*; got 1"):
        expect_flags([True, False, 1], "checkpoint[1]")
