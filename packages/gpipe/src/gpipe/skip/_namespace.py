"""Namespaces for skips that have the same name."""

from __future__ import annotations

import uuid
from typing import Any


class Namespace:
    """A scope for the names of skips: the same name in two namespaces means two skips.

    A namespace equals its copies and unpickled copies, and no other object.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __copy__(self) -> Namespace:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Namespace:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __lt__(self, other: Namespace) -> bool:
        return self._id < other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"
