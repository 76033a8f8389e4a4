"""Valid and invalid values of ``checkpoint``."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe import GPipe
from gpipe.schedule import CHECKPOINT_MODES

from ..layers import linears, piped

MODES = st.sampled_from(CHECKPOINT_MODES)


@given(MODES | st.lists(MODES, min_size=2, max_size=2), st.booleans())
def test_a_pipe_keeps_what_it_was_given(modes: Any, later: bool) -> None:
    pipe = piped(linears(3), [2, 1], **({} if later else {"checkpoint": modes}))
    if later:
        pipe.checkpoint = modes
    assert pipe.checkpoint == modes
    pipe.close()


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([[True, False], "never"], TypeError, r"checkpoint\[0\] must be the mode of partition 0.*torch\.utils\.checkpoint"),
    (["never", [True]], TypeError, r"checkpoint\[1\] must be the mode of partition 1.*got \[True\]"),
    ([True, "never"], TypeError, r"checkpoint\[0\]"),
    (["never"], ValueError, "one mode per partition; got 1 for 2 partitions"),
    (
        ["never", "often"],
        ValueError,
        r"checkpoint\[1\] is not one of 'always', 'except_last', 'never', 'offload': 'often'",
    ),
    ("often", ValueError, "checkpoint is not one of"),
]


@pytest.mark.parametrize(("modes", "kind", "says"), WRONG)
def test_invalid_mode_raises_and_changes_nothing(modes: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        piped(linears(3), [2, 1], checkpoint=modes)
    pipe: GPipe = piped(linears(3), [2, 1], checkpoint="always")
    with pytest.raises(kind, match=says):
        pipe.checkpoint = modes
    assert pipe.checkpoint == "always"
    pipe.close()
