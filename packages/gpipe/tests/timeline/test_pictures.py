"""Pictures, pages and traces: everything is in them, they hold what they say, and they hold any name as text."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Event, Plan, Report, Timeline, plan
from gpipe._check._findings import CODES, Finding
from gpipe.schedule import Kind, one_forward_one_backward
from gpipe.simulate import StageCost, simulate
from gpipe.timeline._chrome import trace
from gpipe.timeline._svg import COLOURS, LANE, svg

from ..plans import ROWS, model_of, profile_of
from ..timelines import fewer, timelines

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: str, class_: str, tag: str = "rect") -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(picture).iter(f"{SVG}{tag}") if class_ in each.get("class", "")]


def said(picture: str) -> list[str]:
    return ["".join(each.itertext()) for each in drawn(picture, "", "text")]


def uniform(m: int, n: int) -> Timeline:
    return simulate(one_forward_one_backward(m, n), [StageCost(0.001, 0.002)] * n)


@fewer
@given(timelines)
def test_each_action_is_drawn_in_its_lane(timeline: Timeline) -> None:
    picture = svg([("", timeline)])
    found, idle = drawn(picture, "cell"), drawn(picture, "idle")
    on_lanes = [(lane, each) for lane, events in zip(idle, timeline.lanes.values(), strict=True) for each in events]
    for cell, (lane, each) in zip(found, on_lanes, strict=True):
        left, width = float(lane.get("x", "nan")), float(lane.get("width", "nan"))
        pixels = width / timeline.makespan if timeline.makespan else 0.0
        x, wide = float(cell.get("x", "nan")), float(cell.get("width", "nan"))
        assert x == pytest.approx(left + (each.start - timeline.start) * pixels, abs=0.011)
        assert wide == pytest.approx(each.seconds * pixels, abs=1.011)  # a pixel may be left for a gap
        assert left - 0.02 <= x <= x + wide <= left + width + 0.02
        assert (cell.get("y"), cell.get("height")) == (lane.get("y"), str(LANE))
        assert cell.get("fill") == COLOURS[each.kind]
        title = cell.findtext(f"{SVG}title", "")
        assert f"micro-batch: {each.microbatch}\nkind: {each.kind.label}\n" in title
    height = float(ElementTree.fromstring(picture).get("height", "nan"))
    assert all(0 <= float(each.get("y", "nan")) <= height for each in drawn(picture, "", "text"))
    spans = [(float(c.get("x", "nan")), float(c.get("width", "nan"))) for c in found]
    for name in drawn(picture, "number", "text"):
        middle, size = float(name.get("x", "nan")), float(name.get("font-size", "nan"))
        half = 0.3 * size * len(name.text or "")
        assert any(x <= middle - half and middle + half <= x + width + 1 for x, width in spans)


def test_stages_that_share_a_worker_differ():
    timeline = simulate(one_forward_one_backward(2, 6), [StageCost(1, 1)] * 6, placement=[0, 1] * 3)
    assert len({each.get("fill-opacity") for each in drawn(svg([("", timeline)]), "cell")}) == 3


def test_the_gist_and_the_axis():
    texts = said(svg([("1F1B", uniform(8, 4)), ("empty", Timeline())]))
    assert "1F1B: 4 stages × 8 micro-batches in 33.0 ms, bubble 27.3 %" in texts
    assert "empty: no actions" in texts
    assert [text for text in texts if re.fullmatch(r"[\d.]+ m?s", text)] == [
        "0 s",
        "8.25 ms",
        "16.5 ms",
        "24.8 ms",
        "33.0 ms",
    ]


@fewer
@given(st.lists(timelines, max_size=3))
def test_legend_names_exactly_the_kinds_shown(shown: list[Timeline]) -> None:
    texts = Counter(said(svg([(str(k), timeline) for k, timeline in enumerate(shown)])))
    kinds = {each.kind for timeline in shown for each in timeline.events}
    assert {kind: texts[kind.label] for kind in Kind} == {kind: int(kind in kinds) for kind in Kind}


@fewer
@given(timelines)
def test_a_trace_has_a_slice_for_each_action(timeline: Timeline) -> None:
    entries = json.loads(trace(timeline))["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    for entry, each in zip(slices, [each for lane in timeline.lanes.values() for each in lane], strict=True):
        assert entry["name"] == str(each)
        assert (entry["ts"], entry["dur"]) == (pytest.approx(each.start * 1e6), pytest.approx(each.seconds * 1e6))
        assert {**entry["args"], "start": each.start, "end": each.end} == asdict(each)


@pytest.mark.parametrize(("ending", "begin"), [("svg", "<svg"), ("html", "<!doctype html>"), ("json", '{"traceEv')])
def test_the_ending_says_what_is_written(ending: str, begin: str, tmp_path: Path):
    path = tmp_path / f"t.{ending}"
    uniform(2, 2).save(path, title="two by two")
    text = path.read_text(encoding="utf-8")
    assert text.startswith(begin)
    assert "two by two" in text


def test_another_beside(tmp_path: Path):
    uniform(2, 2).save(tmp_path / "t.svg", title="predicted", compare_with={"measured": uniform(3, 2)})
    texts = said((tmp_path / "t.svg").read_text(encoding="utf-8"))
    assert [text.split(":")[0] for text in texts if "micro-batches" in text] == ["predicted", "measured"]


@pytest.mark.parametrize(("name", "beside"), [("t.gif", {}), ("t", {}), ("t.json", {"other": Timeline()})])
def test_an_ending_that_does_not_fit(name: str, beside: dict[str, Timeline], tmp_path: Path):
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.svg.* or \.(json|html), got"):
        Timeline().save(tmp_path / name, compare_with=beside)
    assert list(tmp_path.iterdir()) == []


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
    """Return a plan with made-up costs."""
    known = profile_of([(1e-3, 40, 400, 10)] * 2)
    return plan(model_of(known), torch.zeros(ROWS, 3), ["cpu"] * 2, profile=known, chunks=[1, 2], calibrate=False)


@given(texts, texts, st.sampled_from(sorted(CODES)))
def test_pages_are_self_contained_and_escape_names(name: str, note: str, code: str) -> None:
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
