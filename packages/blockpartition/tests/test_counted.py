from hypothesis import given
from hypothesis import strategies as st

from blockpartition._counted import counted


@given(st.integers(0, 10**6), st.sampled_from(["block", "stage", "entry"]))
def test_one_is_alone(number, noun):
    text = counted(number, noun)
    assert text.startswith(f"{number} {noun[:-1]}")
    assert text.endswith("s") == (number != 1)


def test_entries():
    assert [counted(k, "entry") for k in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
