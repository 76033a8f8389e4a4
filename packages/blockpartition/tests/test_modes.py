"""Alternatives for each stage: what a mode costs, and which is chosen. That it is the best, `test_place` shows."""

from fractions import Fraction

import pytest

from blockpartition import Mode, Stage, place, verify

KEEP = Mode("keep")
RECOMPUTE = Mode("recompute", time=Fraction(4, 3), saved=0.25, transient=1)


def test_only_stages_short_of_memory_recompute():
    """1F1B: the first stage holds four micro-batches, the last one."""
    stages = [Stage(capacity=10, modes=[KEEP, RECOMPUTE])] * 4
    found = place([3] * 8, stages, activations=[2] * 8, in_flight="1f1b")
    assert (found.sizes, found.modes) == ((2, 2, 2, 2), ("recompute", "recompute", "keep", "keep"))
    assert found.times == (8, 8, 6, 6)
    verify(found, [3] * 8, stages, activations=[2] * 8, in_flight="1f1b")


def test_of_two_modes_as_good_the_earlier_is_chosen():
    for modes in ([Mode("a"), Mode("b")], [Mode("b"), Mode("a")]):
        assert place([1, 1], [Stage(modes=modes)] * 2).modes == (modes[0].name,) * 2


def test_impossible_modes_are_named():
    with pytest.raises(TypeError, match=r"^modes\[1\] must be a Mode, got 'b' of type str$"):
        Stage(modes=[KEEP, "b"])
    with pytest.raises(ValueError, match=r"^a stage's modes must have different names"):
        Stage(modes=[KEEP, Mode("keep", 2)])
    with pytest.raises(ValueError, match=r"^time of mode 'a' of stage\[0\] must be positive, got 0$"):
        place([1, 2], [Stage(modes=[Mode("a", 0)])])
