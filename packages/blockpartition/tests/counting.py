"""Steps instead of seconds: how many lines Python runs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(call: Callable[..., object], *arguments: Any, **keywords: Any) -> int:
    """Count the lines executed during a call, including repeated ones."""
    count = 0

    def count_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return count_line

    before = sys.gettrace()
    sys.settrace(count_line)
    try:
        call(*arguments, **keywords)
    finally:
        sys.settrace(before)
    return count
