"""Make the packages under test use scheduled objects, even for locks that live as long as the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from threading import Condition as RealCondition
from threading import RLock as RealRLock
from typing import Any
from unittest.mock import patch

from streams import waiting

from .objects import CLASSES, Condition, RLock, active
from .scheduler import Scheduler

PACKAGES = ("streams", "profiler", "gpipe")
_KIND = type(RealRLock())


@contextmanager
def installed(scheduler: Scheduler) -> Iterator[None]:
    """Use objects of ``scheduler`` inside a ``with`` block."""
    active.append(scheduler)
    try:
        with ExitStack() as scope:
            for name, each in CLASSES.items():
                scope.enter_context(patch.object(waiting, name, each))
            for owner, name in locks_of_process(len(sys.modules)):
                scope.enter_context(_replaced(owner, name))
            yield
    finally:
        active.pop()


@cache
def locks_of_process(modules_so_far: int) -> Sequence[tuple[Any, str]]:
    """Return the objects with a lock that was created when a module was imported, and the lock's name."""
    found: list[tuple[Any, str]] = []
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] in PACKAGES]
    for module in modules:
        for name, value in [*vars(module).items()]:
            if isinstance(value, _KIND):
                found.append((module, name))
            elif isinstance(value, type) and value.__module__ == module.__name__:
                # Before Python 3.12, a cached property of a class has one lock for all objects.
                own = [each for each in vars(value).values() if isinstance(each, cached_property)]
                found += [(each, "lock") for each in own if hasattr(each, "lock")]
            elif type(value).__module__.partition(".")[0] in PACKAGES:
                own = getattr(value, "__dict__", {})
                found += [(value, name) for name, each in own.items() if isinstance(each, _KIND)]
    # A module may import the lock of a different module.
    return [*{(id(owner), name): (owner, name) for owner, name in found}.values()]


@contextmanager
def _replaced(owner: Any, name: str) -> Iterator[None]:
    """Replace a lock, and the conditions of the same object, for the duration of a ``with`` block."""
    own = vars(owner)
    lock, scheduled = own[name], RLock()
    conditions = {key: each for key, each in own.items() if isinstance(each, RealCondition) and each._lock is lock}
    changes = {name: scheduled, **{key: Condition(scheduled) for key in conditions}}
    before = {key: own[key] for key in changes}
    for key, value in changes.items():
        setattr(owner, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(owner, key, value)
