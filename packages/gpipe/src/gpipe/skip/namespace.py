"""Namespaces that keep skips with the same name apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID, uuid4


@dataclass(frozen=True, order=True)
class Namespace:
    """A scope for the names of skips: the same name in two namespaces refers to two skips.

    A namespace equals its copies, pickled or not, and no other namespace.
    """

    _id: UUID = field(default_factory=uuid4, init=False)


Key = tuple[Namespace | None, str]
"""A skip: its namespace, if any, and its name in it."""
