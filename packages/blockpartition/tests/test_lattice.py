import pytest

from blockpartition import _lattice
from blockpartition._lattice import lattice


def test_as_many_sets_as_are_allowed_are_looked_at_and_no_more(monkeypatch):
    """Of three stages of one kind and one of another there are eight sets."""
    monkeypatch.setattr(_lattice, "MAX_SETS", 8)
    assert lattice([0, 0, 0, 1], lambda kind, place: []).depth == [0, 1, 1, 2, 2, 3, 3, 4]
    monkeypatch.setattr(_lattice, "MAX_SETS", 7)
    with pytest.raises(ValueError, match=r"of 4 stages of 2 kinds has 8 sets of stages to look at, more than 7"):
        lattice([0, 0, 0, 1], lambda kind, place: [])
