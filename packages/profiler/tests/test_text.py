from hypothesis import given
from hypothesis import strategies as st

from profiler.text import align, format_bytes, format_flops, format_seconds, format_share, time_unit


def test_columns_are_flush():
    assert align([["a", "b"], ["long", "1"], ["c", "222"]], left=1) == "a       b\n─────────\nlong    1\nc     222"


def test_three_digits():
    assert [format_bytes(n) for n in (0, 1, 12.5, 1023, 1024, 10 * 1024, 2**20 - 1, 2**60)] == [
        "0 B", "1 B", "12.5 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB", "1024 PiB",
    ]  # fmt: skip
    assert [format_flops(n) for n in (0, 999, 999.7, 1500, 12e9)] == ["0", "999", "1.00 k", "1.50 k", "12.0 G"]
    assert [format_seconds(s) for s in (0, 1e-7, 0.25, 90)] == ["0 s", "100 ns", "250 ms", "90.0 s"]
    assert [format_share(s) for s in (0, 3 / 11, 1)] == ["0.0 %", "27.3 %", "100.0 %"]


@given(st.floats(1e-9, 1e6))
def test_a_time_is_at_least_one_of_its_unit(seconds):
    length, name = time_unit(seconds)
    assert seconds >= length
    assert format_seconds(length).endswith(f" {name}")


@given(st.floats(1, 1e15))
def test_no_more_than_four_characters_say_the_number(count):
    number = format_bytes(count).split()[0]
    assert len(number.replace(".", "")) <= 4
