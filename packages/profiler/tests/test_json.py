import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from profiler import Profile

from .records import profiles
from .strategies import fewer
from .test_table import TWO


@fewer
@given(profiles())
def test_what_is_written_is_read(profile):
    assert Profile.from_json(profile.to_json()) == profile


@fewer
@given(profiles(), st.data())
def test_a_missing_or_unknown_key_is_refused_by_name(profile, data):
    document = json.loads(profile.to_json())
    part = data.draw(st.sampled_from([document, document["layers"][0]]))
    key = data.draw(st.sampled_from(sorted(part)))
    value = part.pop(key)
    with pytest.raises(ValueError, match=key):
        Profile.from_json(json.dumps(document))
    part[key], part["more"] = value, 1
    with pytest.raises(ValueError, match="does not know more"):
        Profile.from_json(json.dumps(document))


WRONG = {
    "device": 1,
    "rows": -1,
    "rounds": True,
    "chunks": 1.5,
    "layers": {},
    "name": None,
    "saved_bytes": "12",
    "forward_seconds": "1",
    "backward_seconds": -0.5,
    "flops": None,
    "parting_bytes": [],
    "schema": "gpipe-profiler/0",
    "loss": 3,
    "others": {},
}


@fewer
@given(profiles(), st.data())
def test_a_layer_that_occurs_twice_is_refused(profile, data):
    document = json.loads(profile.to_json())
    again = data.draw(st.sampled_from(document["layers"]))
    document["layers"].append(again)
    with pytest.raises(ValueError, match="occurs twice"):
        Profile.from_json(json.dumps(document))


@fewer
@given(profiles())
def test_other_rows_come_in_ascending_order_with_the_same_layers(profile):
    document = json.loads(profile.to_json())
    document["others"].append({**document, "others": []} | {})
    document["others"][-1].pop("schema")
    with pytest.raises(ValueError, match="others: expected profiles of the same layers with fewer rows"):
        Profile.from_json(json.dumps(document))


@fewer
@given(profiles(), st.sampled_from([1.7e308, 1e100, 2**50]))
def test_seconds_of_any_size_can_be_printed(profile, seconds):
    document = json.loads(profile.to_json())
    for layer in document["layers"]:
        layer["forward_seconds"] = layer["backward_seconds"] = seconds
    assert len(str(Profile.from_json(json.dumps(document)))) < 10_000


def test_names_that_no_file_takes_can_be_printed():
    document = json.loads(TWO.to_json())
    document["layers"][0]["name"] = "\ud800"
    found = Profile.from_json(json.dumps(document))
    assert str(found).encode("utf-8")
    assert found._repr_html_().encode("utf-8")
    assert found["\ud800"] is found[0]


@fewer
@given(profiles(), st.sampled_from(sorted(WRONG)))
def test_a_wrong_value_is_refused_by_name(profile, key):
    document = json.loads(profile.to_json())
    part = document if key in document else document["layers"][0]
    part[key] = WRONG[key]
    with pytest.raises(ValueError, match=key):
        Profile.from_json(json.dumps(document))


@fewer
@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
@example("Infinity")
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="profile: expected"):
        Profile.from_json(text)


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 100_000], ids=["digits", "brackets"])
def test_neither_long_nor_deep_text_breaks_the_reader(text):
    with pytest.raises(ValueError, match="profile: expected"):
        Profile.from_json(text)


@fewer
@given(profiles(timed=st.just(True)))
def test_there_is_no_infinity(profile):
    document = json.loads(profile.to_json())
    document["layers"][0]["forward_seconds"] = float("inf")
    with pytest.raises(ValueError, match="expected numbers of JSON, got Infinity"):
        Profile.from_json(json.dumps(document))


@fewer
@given(profiles())
def test_no_key_twice(profile):
    with pytest.raises(ValueError, match="'rows' occurs twice"):
        Profile.from_json('{"rows": 1, ' + profile.to_json().lstrip()[1:])


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([1e308, 10**99]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@fewer
@given(profiles(), _values, st.data())
def test_a_document_that_was_changed_anywhere_is_refused_or_can_be_used(profile, value, data):
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
    assert found._repr_html_().encode()
    assert found.at(found.rows or 1) if found.rows else True


@pytest.mark.parametrize("depth", [2, 100, 800])
def test_profiles_inside_of_profiles_are_refused(depth):
    plain = json.dumps({key: value for key, value in json.loads(TWO.to_json()).items() if key != "schema"})
    before, after = plain.split('"others": []')
    text = before.join(['"others": ['] * depth) + plain + after.join(["]"] * depth)
    document = '{"schema": "gpipe-profiler/3", ' + before[1:] + text + after
    with pytest.raises(ValueError, match=r"others|no JSON"):
        Profile.from_json(document)
