import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from profiler import Profile

from .records import profiles
from .strategies import fewer


@fewer
@given(profiles())
def test_what_is_written_is_read(profile):
    assert Profile.from_json(profile.to_json()) == profile


@fewer
@given(profiles(), st.data())
def test_missing_or_unknown_key_raises(profile, data):
    document = json.loads(profile.to_json())
    part = data.draw(st.sampled_from([document, document["layers"][0]]))
    key = data.draw(st.sampled_from(sorted(part)))
    value = part.pop(key)
    with pytest.raises(ValueError, match=key):
        Profile.from_json(json.dumps(document))
    part[key], part["more"] = value, 1
    with pytest.raises(ValueError, match="unknown more"):
        Profile.from_json(json.dumps(document))


@fewer
@given(profiles(), st.data())
def test_a_layer_that_occurs_twice_is_refused(profile, data):
    document = json.loads(profile.to_json())
    again = data.draw(st.sampled_from(document["layers"]))
    document["layers"].append(again)
    with pytest.raises(ValueError, match="with distinct names"):
        Profile.from_json(json.dumps(document))


@fewer
@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
@example("Infinity")
@example("1" * 5000)
@example("[" * 100_000)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="profile: expected"):
        Profile.from_json(text)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([1e308, 10**99]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@fewer
@given(profiles(), _values, st.data())
def test_corrupted_document_raises_or_is_usable(profile, value, data):
    document = part = json.loads(profile.to_json())
    while True:
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        if not isinstance(part[key], (dict, list)) or not part[key] or data.draw(st.booleans()):
            break
        part = part[key]
    part[key] = value
    try:
        found = Profile.from_json(json.dumps(document))
    except ValueError:
        return
    assert Profile.from_json(found.to_json()) == found
    assert str(found).isprintable() or "\n" in str(found)
    assert found.at(found.rows or 1) if found.rows else True
