"""What flags say, and what schedules see of them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule._flags import as_lists, expect_flags, mode_of, runs_of, scheduled

some_flags = st.lists(st.booleans(), min_size=1, max_size=9)


@given(some_flags)
def test_a_mode_says_what_the_flags_say(flags: list[bool]) -> None:
    mode = mode_of(flags)
    assert ([mode == "always"] * len(flags) if isinstance(mode, str) else list(mode)) == flags
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
