from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from profiler.svg import escaped, line, rect, text


@given(st.text())
def test_any_text_can_be_read_back_but_for_what_xml_forbids(words):
    for mark in (text(0, 0, words), rect(0, 0, 1, 1, "red", words)):
        read = "".join(ElementTree.fromstring(mark).itertext())
        assert len(read) == len(words)
        assert all(a == b or b == "\N{REPLACEMENT CHARACTER}" for a, b in zip(words, read, strict=True))
    assert ElementTree.fromstring(f'<a b="{escaped(words)}"/>').get("b") is not None


def test_a_line_goes_from_one_point_to_the_other():
    found = ElementTree.fromstring(line(1, 2, 3, 4, "black", dash="5 3"))
    assert [float(found.get(name)) for name in ("x1", "y1", "x2", "y2")] == [1, 2, 3, 4]
    assert found.get("stroke-dasharray") == "5 3"
