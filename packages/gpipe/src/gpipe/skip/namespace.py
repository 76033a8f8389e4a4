"""Namespaces for skips that have the same name."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID, uuid4


@dataclass(frozen=True, order=True)
class Namespace:
    """A scope for the names of skips: the same name in two namespaces means two skips.

    A namespace equals its copies and unpickled copies, and no other object.
    """

    _id: UUID = field(default_factory=uuid4, init=False)


Key = tuple[Namespace | None, str]
"""A skip: its namespace, if any, and its name there."""
