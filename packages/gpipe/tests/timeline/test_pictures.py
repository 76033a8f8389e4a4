"""Pictures, pages and traces: everything is in them, and they hold what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Timeline
from gpipe.schedule import Kind, one_forward_one_backward
from gpipe.simulate import StageCost, simulate
from gpipe.timeline._chrome import read, trace
from gpipe.timeline._html import html
from gpipe.timeline._svg import describe, svg

from ..timelines import fewer, timelines

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def cells(picture: str) -> list[ElementTree.Element]:
    return [each for each in drawn(picture).iter(f"{SVG}rect") if each.get("class") == "cell"]


def said(picture: str) -> list[str]:
    return ["".join(each.itertext()) for each in drawn(picture).iter(f"{SVG}text")]


def readable(text: str) -> str:
    """Control characters and lone surrogates have no place in XML."""
    allowed = (c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff") for c in text)
    return "".join(c if fine else "\ufffd" for c, fine in zip(text, allowed, strict=True))


def uniform(m: int, n: int, **more: int) -> Timeline:
    return simulate(one_forward_one_backward(m, n), [StageCost(0.001, 0.002, **more)] * n)


def _places(timeline: Timeline) -> list[float]:
    """Where numbers and strips are drawn, in pixels from the left edge of their lane."""
    picture = drawn(svg([("", timeline)]))
    numbers = [float(each.get("x", "nan")) for text in picture.iter(f"{SVG}text") if text.get("class") == "number"
               for each in text.iter(f"{SVG}tspan")]  # fmt: skip
    strips = [float(x) for path in picture.iter(f"{SVG}path") for x in re.findall(r"H([-\d.]+)", path.get("d", ""))]
    return numbers + strips


class TestPicture:
    @fewer
    @given(timelines)
    def test_every_action_is_a_cell_that_says_what_it_is(self, timeline: Timeline) -> None:
        found = Counter(cell.findtext(f"{SVG}title") for cell in cells(svg([("", timeline)])))
        assert found == Counter(readable(describe(each, timeline.start)) for each in timeline.events)

    @fewer
    @given(timelines)
    def test_cells_are_where_and_as_wide_as_their_times(self, timeline: Timeline) -> None:
        picture = svg([("", timeline)])
        width, span = (float(drawn(picture).get(f"data-{name}", "nan")) for name in ("width", "span"))
        lanes = [each for lane in timeline.lanes.values() for each in lane]
        for cell, each in zip(cells(picture), lanes, strict=True):
            pixels = width / span if span else 0.0
            assert float(cell.get("x", "nan")) == pytest.approx((each.start - timeline.start) * pixels, abs=0.011)
            assert float(cell.get("width", "nan")) == pytest.approx(each.seconds * pixels, abs=0.011)

    @fewer
    @given(timelines)
    def test_nothing_sticks_out(self, timeline: Timeline) -> None:
        picture = drawn(svg([("", timeline)]))
        height = float(picture.get("height", "nan"))
        for each in picture.iter(f"{SVG}svg"):
            assert float(each.get("y", 0)) + float(each.get("height", "nan")) <= height
        assert all(0 <= float(each.get("y", 0)) <= height for each in picture.iter(f"{SVG}text"))

    def test_stages_that_share_a_worker_differ_in_colour(self) -> None:
        timeline = simulate(one_forward_one_backward(2, 6), [StageCost(1, 1)] * 6, placement=[0, 1] * 3)
        fills = {each.get("fill", "") for each in cells(svg([("", timeline)])) if each.get("data-letter") == "F"}
        assert len(fills) == 3
        assert all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in fills)

    def test_the_gist_the_axis_and_the_legend(self) -> None:
        texts = said(svg([("1F1B", uniform(8, 4))]))
        assert "1F1B: 4 stages × 8 micro-batches in 33.0 ms, bubble 27.3 %" in texts
        assert [text for text in texts if re.fullmatch(r"\d+( ms)?", text)][-7:] == [
            *("0", "5", "10", "15", "20", "25"),
            "30 ms",
        ]
        assert texts[-3:] == ["forward", "backward", "grey: idle"]

    @fewer
    @given(timelines)
    def test_numbers_and_strips_are_within_their_lane(self, timeline: Timeline) -> None:
        picture = svg([("", timeline)])
        width = float(drawn(picture).get("data-width", "nan"))
        assert all(-0.02 <= x <= width + 0.02 for x in _places(timeline))

    @fewer
    @given(st.lists(timelines, min_size=1, max_size=3))
    def test_the_legend_names_every_kind_that_occurs_and_no_other(self, shown: list[Timeline]) -> None:
        texts = said(svg([(str(k), timeline) for k, timeline in enumerate(shown)]))
        kinds = {each.kind for timeline in shown for each in timeline.events}
        assert {kind for kind in Kind if kind.label in texts} == kinds

    @pytest.mark.parametrize("place", [0, 1])
    def test_an_empty_panel_beside_a_full_one(self, place: int) -> None:
        panels = [("full", uniform(2, 2)), ("empty", Timeline())]
        texts = said(svg(panels[:: -1 if place else 1]))
        assert "empty: no actions" in texts
        assert len(cells(svg(panels))) == len(uniform(2, 2).events)


class Page(HTMLParser):
    """What a page has in it, as a browser would read it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


class TestPage:
    @fewer
    @given(timelines)
    def test_every_action_is_a_cell(self, timeline: Timeline) -> None:
        page = Page(html([("", timeline)]))
        assert sum(attributes.get("class") == "cell" for _, attributes in page.tags) == len(timeline.events)

    @fewer
    @given(timelines)
    def test_it_needs_nothing_from_anywhere(self, timeline: Timeline) -> None:
        text = html([("", timeline)])
        fetching = {"src", "href", "xlink:href", "data", "action", "poster", "srcset"}
        assert [(tag, name) for tag, attributes in Page(text).tags for name in attributes if name in fetching] == []
        assert re.findall(r"@import|url\(|fetch\(|XMLHttpRequest|import\s*\(", text) == []

    @given(st.sampled_from(["</title><script>alert(1)</script>", "a & b", "{{picture}}"]))
    def test_titles_are_only_text(self, title: str) -> None:
        page = Page(html([(title, uniform(1, 1))]))
        assert sum(tag == "script" for tag, _ in page.tags) == 1
        assert sum(tag == "svg" and "data-span" in attributes for tag, attributes in page.tags) == 1


class TestTrace:
    @fewer
    @given(timelines)
    def test_round_trip(self, timeline: Timeline) -> None:
        twin = read(trace(timeline))
        assert (twin.events, twin.workers) == (timeline.events, timeline.workers)

    @fewer
    @given(timelines)
    def test_slices_have_the_times_in_microseconds(self, timeline: Timeline) -> None:
        slices = [entry for entry in json.loads(trace(timeline))["traceEvents"] if entry["ph"] == "X"]
        by_worker = [each for lane in timeline.lanes.values() for each in lane]
        for entry, each in zip(slices, by_worker, strict=True):
            assert entry["name"] == str(each)
            assert entry["ts"] == pytest.approx(each.start * 1e6)
            assert entry["dur"] == pytest.approx(each.seconds * 1e6)

    @fewer
    @given(timelines)
    def test_memory_is_a_counter_of_each_device(self, timeline: Timeline) -> None:
        entries = json.loads(trace(timeline))["traceEvents"]
        pids = {e["args"]["name"]: e["pid"] for e in entries if e["name"] == "process_name"}
        for device, pid in pids.items():
            stages = {each.stage for each in timeline.events if each.device == device}
            counted = [(e["ts"], e["args"]["bytes"]) for e in entries if e["ph"] == "C" and e["pid"] == pid]
            assert counted == [(pytest.approx(moment * 1e6), size) for moment, size in timeline.held(*stages)]

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"traceEvents": []}', "3", '{"otherData": {"workers": 1}}'])
    def test_another_file(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"expected a file that Timeline\.save wrote"):
            read(text)


class TestFiles:
    @pytest.mark.parametrize("ending", ["svg", "html", "json"])
    def test_the_ending_says_what_is_written(self, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"t.{ending}"
        uniform(2, 2).save(path, title="two by two")
        begin = {"svg": "<svg", "html": "<!doctype html>", "json": '{"traceEvents"'}[ending]
        text = path.read_text(encoding="utf-8")
        assert text.startswith(begin)
        assert "two by two" in text

    def test_another_beside(self, tmp_path: Path) -> None:
        uniform(2, 2).save(tmp_path / "t.svg", title="predicted", beside={"measured": uniform(3, 2)})
        texts = said((tmp_path / "t.svg").read_text(encoding="utf-8"))
        assert [text.split(":")[0] for text in texts if "micro-batches" in text] == ["predicted", "measured"]
