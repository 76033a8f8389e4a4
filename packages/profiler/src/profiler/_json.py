"""Profiles as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from . import documents
from ._data import ProfileData
from .documents import expect_once

Profile = TypeVar("Profile", bound=ProfileData)

SCHEMA = "gpipe-profiler/3"


def dump(profile: ProfileData) -> str:
    return documents.dump(profile, SCHEMA)


def load(cls: type[Profile], text: str) -> Profile:
    """The profile of `text`. Raises ValueError with the path of the first thing that `dump` would not have written."""
    profile = documents.load(cls, text, "profile", SCHEMA)
    _expect_whole([*profile.others, profile])
    return profile


def _expect_whole(profiles: Sequence[ProfileData]) -> None:
    """Raises unless layers and skips are the same for all numbers of rows, and each layer occurs once."""
    for each in profiles:
        expect_once(each.names, "profile")
        if not each.names:
            raise ValueError("layers: expected at least one")
        for skip in each.skips:
            if not skip.source < skip.target < len(each):
                raise ValueError(f"skips: expected a source before a target among {len(each)} layers, got {skip}")
    for fewer, more in pairwise(profiles):
        if _form(fewer) != _form(more) or fewer.rows >= more.rows or fewer.others:
            raise ValueError("others: expected profiles of the same layers with fewer rows, in ascending order")


def _form(profile: ProfileData) -> tuple[object, ...]:
    return profile.names, [(skip.source, skip.target) for skip in profile.skips], profile.loss is None
