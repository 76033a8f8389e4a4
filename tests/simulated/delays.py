"""Workers that pause before some of their transfers, always before the same ones for the same seed.

The pauses are sleeps on purpose. They make threads reach their operations in unusual orders, and nothing waits for
them: tests pass for any length of the pauses, zero included, and assert that results do not depend on it. Events could
set the order instead, but would deadlock under some schedules, which the tests choose at random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gpipe.transport._link import Link

LONGEST = 0.001
"""The longest pause, in seconds."""


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Inside, threads pause before they send or receive: not at all, just to let others run, or for up to 1 ms.

    How long depends on the seed, the link and the micro-batch alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "get"):
            patch.setattr(Link, name, _after_a_pause(getattr(Link, name), f"{seed} {name}"))
        yield


def _after_a_pause(method: Callable[..., Any], seed: str) -> Callable[..., Any]:
    def paused(link: Link[Any], microbatch: int, *payload: Any) -> Any:
        choice = random.Random(f"{seed} {link.name} {microbatch}")
        if choice.random() < 0.5:
            time.sleep(choice.choice([0.0, choice.random() * LONGEST]))
        return method(link, microbatch, *payload)

    return paused
