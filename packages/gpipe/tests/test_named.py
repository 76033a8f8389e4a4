"""Schedules by their names."""

from __future__ import annotations

import pytest

from gpipe.schedule import named

pytestmark = pytest.mark.timeout(60)


class TestNames:
    @pytest.mark.parametrize("name", ["1F1B", "1f1b", "Fill_Drain", "ZERO_BUBBLE"])
    def test_capitals_do_not_matter(self, name: str) -> None:
        assert named(name, 3, [0, 1]) == named(name.lower(), 3, [0, 1])

    @pytest.mark.parametrize(
        ("name", "meant"), [("1f1b ", "1f1b"), ("fill-drain", "fill_drain"), ("zerobubble", "zero")]
    )
    def test_what_was_meant_is_said(self, name: str, meant: str) -> None:
        with pytest.raises(ValueError, match=rf"there is no schedule {name!r}; .*; did you mean '{meant}"):
            named(name, 3, [0, 1])
