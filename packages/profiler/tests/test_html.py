"""Reports in HTML hold any text, and need nothing from anywhere."""

import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from profiler.html import fragment, page, table
from profiler.svg import escaped

from .records import profiles
from .strategies import fewer

_texts = st.text() | st.sampled_from(["</td><script>alert(1)</script>", "a & b", "\ud800", "<b>"])


class Reading(HTMLParser):
    """Cells and elements, as a browser would find them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes = getattr(self, "attributes", [])
        self.attributes += [name for name, _ in attrs]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(_texts, min_size=n, max_size=n), min_size=1, max_size=4)))
def test_cells_hold_any_text(rows):
    read = Reading(table(rows, left=1))
    assert len(read.cells) == sum(map(len, rows))
    assert set(read.tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    table(rows, left=1).encode()


@given(_texts)
def test_titles_of_pages_are_only_text(title):
    text = page(title, "<p>body</p>")
    assert Reading(text).tags == ["html", "head", "meta", "meta", "title", "style", "body", "p"]
    assert f"<title>{escaped(title)}</title>" in text


@fewer
@given(profiles())
def test_notebooks_show_a_profile_with_a_picture_and_a_table(profile):
    shown = Reading(profile._repr_html_())
    lines = len(profile) + (profile.loss is not None) + 2
    assert shown.tags.count("tr") == lines
    assert shown.tags.count("svg") == 1
    assert "script" not in shown.tags


@fewer
@given(profiles())
def test_a_report_needs_nothing_from_anywhere(profile):
    text = profile._repr_html_()
    assert not {"src", "href", "xlink:href", "srcset"} & set(Reading(text).attributes)
    assert re.findall(r"@import|url\(", text) == []


def test_it_follows_the_choice_of_light_or_dark():
    assert "prefers-color-scheme: dark" in fragment("")
