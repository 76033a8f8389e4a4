"""``functools.cached_property`` without a lock.

Before Python 3.12, all objects of a class share the lock of such a property. A fork would leave it locked in the child
if another thread is computing the property, and a nested run could wait for the run around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801 - named like the class that it replaces
        """A method whose result is stored in the object. If two threads call it, both get the first result."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._function(instance))
