from dataclasses import replace

import pytest
from hypothesis import given

from .records import profiles
from .strategies import fewer
from .test_table import TWO


@fewer
@given(profiles(), profiles())
def test_every_layer_of_either_occurs_once(before, after):
    changes = before.diff(after)
    assert [c.name for c in changes] == list(dict.fromkeys(before.names + after.names))
    assert changes.removed == [name for name in before.names if name not in after.names]
    assert changes.added == [name for name in after.names if name not in before.names]
    assert len(str(changes).split("\n")) >= len(changes) + 2


@fewer
@given(profiles())
def test_nothing_changed(profile):
    for change in profile.diff(profile):
        assert change.before is change.after
        assert change.ratio("saved_bytes") in (None, 1.0)


def test_ratios():
    conv, head = TWO
    after = replace(TWO, layers=(replace(conv, forward_seconds=3e-3, saved_bytes=2**19), replace(head, name="tail")))
    changes = TWO.diff(after)
    assert changes["conv"].ratio("seconds") == pytest.approx(6 / 4.5)
    assert changes["conv"].ratio("saved_bytes") == 0.5
    assert changes["conv"].ratio("buffer_bytes") is None  # of nothing
    gone = TWO.diff(replace(TWO, layers=(replace(conv, saved_bytes=0), head)))
    assert gone["conv"].ratio("saved_bytes") == 0
    assert changes["head"].ratio("seconds") is None
    assert (changes.removed, changes.added) == (["head"], ["tail"])
    line = next(line for line in str(changes).split("\n") if line.startswith("conv"))
    assert "4.50 ms → 6.00 ms  ×1.33" in line
    assert "1.00 MiB → 512 KiB  ×0.50" in line
    with pytest.raises(KeyError, match="no layer 'nowhere' in either profile"):
        changes["nowhere"]
    with pytest.raises(ValueError, match="by: expected one of"):
        changes["conv"].ratio("weight")
