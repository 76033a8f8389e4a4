"""Classes and members of enums by name. Both are only looked up: nothing is imported or called."""

from __future__ import annotations

import enum
import sys
from typing import Any


def name_of(kind: type) -> str:
    """``kind`` as ``module:qualname``. Raises TypeError if that name does not lead to it."""
    for module in (kind.__module__, "types"):  # types such as NoneType name builtins as their module, but are not in it
        if _found(module, kind.__qualname__) is kind:
            return f"{module}:{kind.__qualname__}"
    raise TypeError(
        f"is of class {kind.__qualname__}, which another process cannot find by that name in {kind.__module__}; "
        "define it at the top of a module"
    )


def class_of(name: str) -> type:
    """The class that :func:`name_of` has named. Raises ValueError if it is in no module that is imported here."""
    module, _, path = name.partition(":")
    kind = _found(module, path)
    if kind is None:
        raise ValueError(
            f"there is no class {path} in a module {module} that is imported here; import it on every rank"
        )
    return kind


def _found(module: str, path: str) -> type | None:
    found: Any = sys.modules.get(module)
    kind: type | None = None
    for name in path.split("."):
        found = _attributes(found).get(name)
        if not isinstance(found, type):
            return None
        kind = found
    return kind


def _attributes(owner: Any) -> Any:
    """The attributes without getattr, which may run code: modules and metaclasses may define ``__getattr__``."""
    return getattr(owner, "__dict__", {})


def member_names(member: enum.Enum) -> list[str]:
    """The name of ``member``, or of the flags that it combines. Raises TypeError if there is a value without a name."""
    kind = type(member)
    if member.name in kind.__members__:
        return [member.name]
    if isinstance(member, enum.Flag):
        parts = [name for name, part in kind.__members__.items() if part and part in member]  # type: ignore[operator]
        if _union(kind, parts) == member:
            return parts
    raise TypeError(f"is {member!r}, which has no name")


def member_of(kind: type, names: list[str]) -> enum.Enum:
    """The member of ``kind`` whose :func:`member_names` are ``names``. Raises ValueError if there is none."""
    if not issubclass(kind, enum.Enum) or not set(names) <= set(kind.__members__):
        raise ValueError(f"{kind.__qualname__} is no enum with members {names}")
    return kind.__members__[names[0]] if len(names) == 1 else _union(kind, names)


def _union(kind: type[enum.Enum], names: list[str]) -> Any:
    if not issubclass(kind, enum.Flag):
        raise ValueError(f"{kind.__qualname__} is no enum of flags; expected one member, not {names}")
    whole: Any = next(iter(kind.__members__.values()))
    whole ^= whole  # the flag with no bit set
    for name in names:
        whole |= kind.__members__[name]
    return whole
