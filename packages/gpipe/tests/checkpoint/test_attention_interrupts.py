"""An interrupt at the beginning or the end of a turn leaves the choice of kernels as it was, and no turn behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from packages.streams.tests.fakes import in_thread
from packages.streams.tests.interleavings.interrupts import Interrupts

from gpipe._torch import attention_settings, set_attention
from gpipe.checkpoint import _attention

FILES = [_attention.__file__]


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


def has_turn(turns: _attention._Turns, choice: _attention.Kernels, expected: tuple[Any, ...]) -> None:
    with turns.of(choice):
        assert attention_settings() == expected


@pytest.mark.parametrize("has_choice", [True, False])
def test_an_interrupt_anywhere_leaves_nothing_behind(has_choice: bool) -> None:
    before, choice = attention_settings(), other_choice() if has_choice else None
    for at in count(1):
        turns = _attention._Turns()
        was_interrupted = Interrupts(FILES, at).during(lambda: has_turn(turns, choice, choice or before))  # noqa: B023
        assert attention_settings() == before
        assert (turns._running, turns._now) == (set(), None)
        # On a different thread, because a lock that was not released can be acquired again by this one.
        in_thread(lambda: has_turn(turns, choice, choice or before))  # noqa: B023
        assert attention_settings() == before
        if not was_interrupted:
            break
    assert at > 5


def test_turn_after_interrupted_end_has_its_choice() -> None:
    before, choice, turns = attention_settings(), other_choice(), _attention._Turns()
    first, second = object(), object()
    turns._begin(first, choice)
    for at in count(1):
        if not Interrupts(FILES, at).during(lambda: turns._end(first)):
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
    assert at > 2
    assert (turns._running, turns._now) == (set(), None)
