"""What notebooks show: it holds any name as text, brings what it needs, and is light or dark."""

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Event, Plan, Report, Timeline, plan
from gpipe._check._findings import CODES, Finding

from ..plans import ROWS, model_of, profile_of

MARKUP = ["</b><script>alert(1)</script>", "a & b", "<img src=x onerror=alert(1)>", "\ud800", '"', "{{title}}"]
texts = st.sampled_from(MARKUP) | st.text(max_size=20)


class Reading(HTMLParser):
    """The elements, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag, *(name for name, _ in attrs)]


@cache
def example() -> Plan:
    """Of made-up costs."""
    known = profile_of([(1e-3, 40, 400, 10)] * 2)
    return plan(model_of(known), torch.zeros(ROWS, 3), ["cpu"] * 2, profile=known, chunks=[1, 2], calibrate=False)


@given(texts, texts, st.sampled_from(sorted(CODES)))
def test_it_fetches_and_runs_nothing_and_can_be_written_to_a_file(name: str, note: str, code: str) -> None:
    finding = Finding(code, name, name, note, note)
    event = Event(0, 0, "forward", name, 0.0, 1.0, layers=note)
    layers = tuple(replace(each, name=name) for each in example().layers)
    shown = {
        "a report": Report((finding,), name, (note,)),
        "a timeline": Timeline([event]),
        "a plan": replace(example(), layers=layers, notes=(note,), devices=(name, name)),
    }
    for each in shown.values():
        text = each._repr_html_()
        text.encode()
        reading = Reading()
        reading.feed(text)
        reading.close()
        forbidden = {"script", "img", "link", "iframe", "src", "href", "xlink:href", "srcset", "onerror", "onload"}
        assert not forbidden & set(reading.found)
        assert re.findall(r"@import|url\(", text) == []
        assert "prefers-color-scheme: dark" in text
        assert reading.found.count("svg") == (each is not shown["a report"])
