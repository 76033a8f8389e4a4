"""The random number generators of the interpreter: Python's ``random``, and NumPy's global one."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def generator_states() -> dict[str, Any]:
    """Return the state of each generator that may be in use, by its name."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy.random"] = numpy.random.get_state(legacy=False)
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy.random" in states:
        sys.modules["numpy"].random.set_state(states["numpy.random"])


def changed_generators(before: dict[str, Any]) -> list[str]:
    """Return the names of generators whose state is different from the one in ``before``."""
    now = generator_states()
    return [name for name in before if pickle.dumps(now[name]) != pickle.dumps(before[name])]


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states afterwards."""
    before = generator_states()
    try:
        yield
    finally:
        set_generator_states(before)
