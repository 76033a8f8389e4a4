"""What notebooks show: it holds any name as text, brings what it needs, and is light or dark."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import Plan, Report, Timeline, plan
from gpipe._check._findings import CODES, Finding

from ..plans import ROWS, profile_of
from ..timelines import timelines

pytestmark = pytest.mark.usefixtures("one_thread")

MARKUP = ["</b><script>alert(1)</script>", "a & b", "<img src=x onerror=alert(1)>", "\ud800", '"', "{{title}}"]
texts = st.sampled_from(MARKUP) | st.text(max_size=20)


class Reading(HTMLParser):
    """The elements and the text, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def harmless(text: str) -> Reading:
    """Reads it, after looking that it fetches and runs nothing and can be written to a file."""
    text.encode()
    read = Reading(text)
    assert not {"script", "img", "link", "iframe"} & set(read.tags)
    assert not {"src", "href", "xlink:href", "srcset", "onerror", "onload"} & set(read.attributes)
    assert re.findall(r"@import|url\(", text) == []
    assert "prefers-color-scheme: dark" in text
    return read


@cache
def example() -> Plan:
    """Of made-up costs."""
    known = profile_of([(1e-3, 40, 400, 10)] * 2)
    model = nn.Sequential(OrderedDict((name, nn.Sequential(nn.Linear(3, 3))) for name in known.names))
    return plan(model, torch.zeros(ROWS, 3), ["cpu"] * 2, profile=known, chunks=[1, 2], calibrate=False)


findings = st.builds(Finding, st.sampled_from(sorted(CODES)), st.none() | texts, texts, texts, texts)
reports = st.builds(
    Report,
    st.lists(findings, max_size=4).map(tuple),
    layers=st.integers(1, 99),
    rows=st.integers(2, 99),
    microbatches=st.integers(2, 9),
    dtype=st.just("float64"),
    compared=st.lists(texts, max_size=2).map(tuple),
)


@given(texts, texts)
def test_a_plan(name: str, note: str) -> None:
    layers = tuple(replace(key, name=name) for key in example().layers)
    shown = harmless(replace(example(), layers=layers, notes=(note,), devices=(name, name))._repr_html_())
    assert shown.tags.count("svg") == 1


@given(reports)
def test_a_report(report: Report) -> None:
    shown = harmless(report._repr_html_())
    for finding in report.findings:
        assert f"{finding.level}[{finding.code}]" in shown.text
        assert finding.advice in shown.text


@given(timelines)
def test_a_timeline(timeline: Timeline) -> None:
    shown = harmless(timeline._repr_html_())
    assert shown.tags.count("rect") >= len(timeline.events)
    assert shown.tags.count("title") == len(timeline.events)


@pytest.mark.parametrize("ending", ["html", "json", "txt"])
def test_a_report_is_saved_as_its_ending_says(ending: str, tmp_path: Path) -> None:
    report = Report((Finding("rows", "<b>", "Odd", "rows differ", "1 < 2"),), 3, 8, 4, "float64", ())
    report.save(tmp_path / f"check.{ending}")
    text = (tmp_path / f"check.{ending}").read_text(encoding="utf-8")
    if ending == "html":
        assert text.startswith("<!doctype html>")
        assert "1 < 2" in harmless(text).text
    else:
        assert text == (report.to_json() if ending == "json" else f"{report}\n")
