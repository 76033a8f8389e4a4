"""Pictures, pages and traces: everything is in them, and they hold what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Event, Timeline
from gpipe.schedule import Kind, one_forward_one_backward
from gpipe.simulate import StageCost, simulate
from gpipe.timeline._chrome import read, trace
from gpipe.timeline._html import html
from gpipe.timeline._svg import describe, svg
from profiler.text import format_bytes, format_seconds

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
    @given(timelines, timelines)
    def test_two_beside_each_other_have_one_scale(self, one: Timeline, other: Timeline) -> None:
        picture = drawn(svg([("predicted", one), ("measured", other)]))
        assert float(picture.get("data-span", "nan")) == max(one.makespan, other.makespan)
        plots = [plot for plot in picture.iter(f"{SVG}svg") if plot.get("class") == "plot"]
        assert len(plots) == len(one.lanes) + len(other.lanes)
        assert len({plot.get("width") for plot in plots}) <= 1

    @fewer
    @given(timelines)
    def test_nothing_sticks_out(self, timeline: Timeline) -> None:
        picture = drawn(svg([("", timeline)]))
        height = float(picture.get("height", "nan"))
        for each in picture.iter(f"{SVG}svg"):
            assert float(each.get("y", 0)) + float(each.get("height", "nan")) <= height
        assert all(0 <= float(each.get("y", 0)) <= height for each in picture.iter(f"{SVG}text"))

    @pytest.mark.parametrize(("m", "n"), [(8, 4), (24, 4), (64, 8)])
    def test_every_cell_has_its_letter_and_number(self, m: int, n: int) -> None:
        numbers = ["".join(each.itertext()) for each in drawn(svg([("", uniform(m, n))])).iter(f"{SVG}text")
                   if each.get("class") == "number"]  # fmt: skip
        assert Counter(numbers) == {f"{letter}{i}": n for letter in "FB" for i in range(m)}

    def test_the_gist_the_axis_and_the_legend(self) -> None:
        texts = said(svg([("1F1B", uniform(8, 4))]))
        assert "1F1B: 4 stages × 8 micro-batches in 33.0 ms, bubble 27.3 %" in texts
        assert [text for text in texts if re.fullmatch(r"\d+( ms)?", text)][-7:] == [
            *("0", "5", "10", "15", "20", "25"),
            "30 ms",
        ]
        assert texts[-3:] == ["forward", "backward", "grey: idle"]

    def test_memory_is_a_strip_of_its_own_if_there_is_any(self) -> None:
        strips = [
            list(drawn(svg([("", timeline)])).iter(f"{SVG}path"))
            for timeline in (uniform(8, 4), uniform(8, 4, activation_bytes=1000))
        ]
        assert [len(each) for each in strips] == [0, 4]

    def test_where_memory_is_unknown_nothing_is_said_of_it(self) -> None:
        known = uniform(8, 4, activation_bytes=1000)
        unknown = Timeline((replace(each, held_bytes=None) for each in known.events), known.workers)
        picture = svg([("known", known), ("unknown", unknown)])
        assert len(list(drawn(picture).iter(f"{SVG}path"))) == 4
        assert sum(text.endswith(" B") or text.endswith("KiB") for text in said(picture)) == 4 + 1

    @pytest.mark.parametrize("beside", [[], [("", uniform(8, 4, activation_bytes=3000))]])
    def test_strips_are_as_high_as_what_is_kept(self, beside: list[tuple[str, Timeline]]) -> None:
        picture = drawn(svg([("", uniform(8, 4, activation_bytes=1000)), *beside]))
        heights = [
            44 - min(float(y) for y in re.findall(r"V([\d.]+)", path.get("d", "")))
            for path in picture.iter(f"{SVG}path")
        ]
        most = 12 if not beside else 4
        assert heights[:4] == pytest.approx([most * in_flight / 4 for in_flight in (4, 3, 2, 1)])
        assert max(heights) == 12

    def test_stages_that_share_a_worker_differ_in_colour(self) -> None:
        timeline = simulate(one_forward_one_backward(2, 4), [StageCost(1, 1)] * 4, placement=[0, 1, 0, 1])
        forwards = {each.get("fill") for each in cells(svg([("", timeline)])) if each.get("data-letter") == "F"}
        assert len(forwards) == 2

    @fewer
    @given(timelines, st.sampled_from([0.0, 3.25, 4096.0]))
    def test_only_times_within_the_run_are_drawn(self, timeline: Timeline, delay: float) -> None:
        """A run that is recorded late in a session looks like one at its beginning."""
        later = Timeline(
            (replace(each, start=each.start + delay, end=each.end + delay) for each in timeline.events),
            timeline.workers,
        )
        for now, then in zip(*map(_places, (timeline, later)), strict=True):
            assert then == pytest.approx(now, abs=0.02)

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

    def test_nothing_happened(self) -> None:
        assert "no actions" in said(svg([("", Timeline())]))

    def test_notebooks_show_it(self) -> None:
        assert cells(uniform(2, 2)._repr_svg_())


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
    def test_it_is_in_the_format_that_viewers_read(self, timeline: Timeline) -> None:
        content = json.loads(trace(timeline, "training"))
        assert content["displayTimeUnit"] in ("ms", "ns")
        for entry in content["traceEvents"]:
            assert entry["ph"] in "XMC"
            assert isinstance(entry["name"], str)
            assert isinstance(entry["pid"], int)
            assert isinstance(entry["tid"], int)
            if entry["ph"] == "X":
                assert entry["dur"] >= 0
            if entry["ph"] == "C":
                assert all(isinstance(value, int) for value in entry["args"].values())

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
    def test_every_process_and_thread_in_use_has_a_name(self, timeline: Timeline) -> None:
        entries = json.loads(trace(timeline))["traceEvents"]
        named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"].endswith("_name")}
        for entry in (entry for entry in entries if entry["ph"] == "X"):
            assert named["process_name", entry["pid"], 0] == entry["args"]["device"]
            assert str(entry["args"]["stage"]) in named["thread_name", entry["pid"], entry["tid"]]

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

    def test_what_was_saved_is_loaded(self, tmp_path: Path) -> None:
        timeline = uniform(3, 2, activation_bytes=5)
        timeline.save(str(tmp_path / "t.json"))
        assert Timeline.load(tmp_path / "t.json").events == timeline.events

    def test_another_beside(self, tmp_path: Path) -> None:
        uniform(2, 2).save(tmp_path / "t.svg", title="predicted", beside={"measured": uniform(3, 2)})
        texts = said((tmp_path / "t.svg").read_text(encoding="utf-8"))
        assert [text.split(":")[0] for text in texts if "micro-batches" in text] == ["predicted", "measured"]


class TestUnits:
    def test_there_are_never_four_digits(self) -> None:
        assert (format_seconds(999.7e-9), format_bytes(1023.8 * 1024)) == ("1.00 µs", "1.00 MiB")

    @given(st.floats(1e-9, 1e9))
    def test_three_digits_tell_the_size(self, value: float) -> None:
        number, unit = format_seconds(value).split()
        factor = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
        assert float(number) * factor == pytest.approx(value, rel=0.006)

    @given(st.integers(0, 2**60))
    def test_bytes_are_in_binary_units(self, value: int) -> None:
        number, unit = format_bytes(value).split()
        factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
        assert float(number) * factor == pytest.approx(value, rel=0.006)

    def test_a_cell_without_layers_or_memory_says_nothing_of_them(self) -> None:
        lines = describe(Event(1, 2, "backward_weight", "cuda:1", 3.0, 3.5, 0.25, 2048), begin=1.0).splitlines()
        assert lines == [
            "stage: 1",
            "micro-batch: 2",
            "kind: backward for the weights",
            "device: cuda:1",
            "start: 2 s",
            "duration: 500 ms",
            "waited: 250 ms",
            "moved: 2.00 KiB",
        ]
