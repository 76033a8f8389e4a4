"""An interrupt at the beginning or the end of a turn leaves the choice of kernels as it was, and no turn behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gpipe._torch import attention_settings, set_attention
from gpipe.checkpoint import _attention


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    before = attention_settings()
    yield
    set_attention(dict(enumerate(before)))


def other_choice() -> tuple[Any, ...]:
    """A choice in which one of the kernels is off."""
    now = attention_settings()
    k = next(k for k, value in enumerate(now) if value is True)
    return (*now[:k], False, *now[k + 1 :])


@contextmanager
def interrupted(function: Any, at: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the line ``at`` of the first call of ``function``; count its lines."""
    lines: list[int] = []
    frames: list[Any] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__ or (frames and frame not in frames):
            return None
        frames[:] = [frame]
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("has_choice", [True, False])
@pytest.mark.parametrize("name", ["_begin", "_end", "_restore"])
def test_an_interrupt_in_any_line_leaves_nothing_behind(name: str, has_choice: bool) -> None:
    before, choice = attention_settings(), other_choice() if has_choice else None
    at = 0
    while True:
        at += 1
        turns = _attention._Turns()
        with interrupted(getattr(_attention._Turns, name), at) as lines:
            try:
                with turns.of(choice):
                    assert attention_settings() == (choice or before)
            except KeyboardInterrupt:
                pass
            else:
                break
        assert attention_settings() == before
        assert (turns._running, turns._now) == (set(), None), f"after line {lines[-1]}"
        with turns.of(choice):
            assert attention_settings() == (choice or before)
        assert attention_settings() == before
    assert at > 2


def test_a_turn_that_begins_after_an_interrupted_end_has_its_choice() -> None:
    before, choice, turns = attention_settings(), other_choice(), _attention._Turns()
    first, second = object(), object()
    turns._begin(first, choice)
    for at in range(1, 100):
        with interrupted(_attention._Turns._restore, at) as lines:
            try:
                turns._end(first)
            except KeyboardInterrupt:
                pass
            else:
                break
        if turns._now == choice:  # others with the same choice need not wait
            turns._begin(second, choice)
            assert attention_settings() == choice
            turns._end(first)
            assert attention_settings() == choice
            turns._end(second)
        else:
            turns._end(first)
        assert attention_settings() == before
        turns._begin(first, choice)
    assert len(lines) > 1
    assert (turns._running, turns._now) == (set(), None)
