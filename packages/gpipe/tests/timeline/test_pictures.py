"""Pictures, pages and traces: everything is in them, and they hold what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Timeline
from gpipe.schedule import Kind, one_forward_one_backward
from gpipe.simulate import StageCost, simulate
from gpipe.timeline._chrome import trace
from gpipe.timeline._svg import COLOURS, LANE, describe, svg

from ..timelines import fewer, timelines

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: str, class_: str, tag: str = "rect") -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(picture).iter(f"{SVG}{tag}") if class_ in each.get("class", "")]


def said(picture: str) -> list[str]:
    return ["".join(each.itertext()) for each in drawn(picture, "", "text")]


def readable(text: str) -> str:
    """Control characters and lone surrogates have no place in XML."""
    allowed = (c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff") for c in text)
    return "".join(c if fine else "\ufffd" for c, fine in zip(text, allowed, strict=True))


def uniform(m: int, n: int, **more: int) -> Timeline:
    return simulate(one_forward_one_backward(m, n), [StageCost(0.001, 0.002, **more)] * n)


class TestPicture:
    @fewer
    @given(timelines)
    def test_every_action_is_a_cell_in_its_lane_as_wide_as_its_time(self, timeline: Timeline) -> None:
        picture = svg([("", timeline)])
        found, idle = drawn(picture, "cell"), drawn(picture, "idle")
        titles = Counter(cell.findtext(f"{SVG}title") for cell in found)
        assert titles == Counter(readable(describe(each, timeline.start)) for each in timeline.events)
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

    @fewer
    @given(timelines)
    def test_names_are_within_their_cells_and_nothing_sticks_out(self, timeline: Timeline) -> None:
        picture = svg([("", timeline)])
        height = float(ElementTree.fromstring(picture).get("height", "nan"))
        assert all(0 <= float(each.get("y", "nan")) <= height for each in drawn(picture, "", "text"))
        spans = [(float(c.get("x", "nan")), float(c.get("width", "nan"))) for c in drawn(picture, "cell")]
        for name in drawn(picture, "number", "text"):
            middle, size = float(name.get("x", "nan")), float(name.get("font-size", "nan"))
            half = 0.3 * size * len(name.text or "")
            assert any(x <= middle - half and middle + half <= x + width + 1 for x, width in spans)

    def test_stages_that_share_a_worker_differ(self) -> None:
        timeline = simulate(one_forward_one_backward(2, 6), [StageCost(1, 1)] * 6, placement=[0, 1] * 3)
        shades = {each.get("fill-opacity") for each in drawn(svg([("", timeline)]), "cell")}
        assert len(shades) == 3

    def test_the_gist_the_axis_and_the_legend(self) -> None:
        texts = said(svg([("1F1B", uniform(8, 4))]))
        assert "1F1B: 4 stages × 8 micro-batches in 33.0 ms, bubble 27.3 %" in texts
        assert [text for text in texts if re.fullmatch(r"\d+( ms)?", text)] == [
            *("0", "5", "10", "15", "20", "25"),
            "30 ms",
        ]

    @fewer
    @given(st.lists(timelines, min_size=1, max_size=3))
    def test_the_legend_names_every_kind_that_occurs_and_no_other(self, shown: list[Timeline]) -> None:
        texts = said(svg([(str(k), timeline) for k, timeline in enumerate(shown)]))
        kinds = {each.kind for timeline in shown for each in timeline.events}
        assert {kind for kind in Kind if kind.label in texts} == kinds

    @pytest.mark.parametrize("place", [0, 1])
    def test_an_empty_panel_beside_a_full_one(self, place: int) -> None:
        panels = [("full", uniform(2, 2)), ("empty", Timeline())]
        picture = svg(panels[:: -1 if place else 1])
        assert "empty: no actions" in said(picture)
        assert len(drawn(picture, "cell")) == len(uniform(2, 2).events)

    def test_times_of_two_units_have_no_common_scale(self) -> None:
        with pytest.raises(ValueError, match="timelines in s and in ticks have no common scale"):
            svg([("", uniform(1, 1)), ("", Timeline(unit="ticks"))])


class TestTrace:
    @fewer
    @given(timelines)
    def test_slices_have_the_times_in_microseconds(self, timeline: Timeline) -> None:
        slices = [entry for entry in json.loads(trace(timeline))["traceEvents"] if entry["ph"] == "X"]
        by_worker = [each for lane in timeline.lanes.values() for each in lane]
        for entry, each in zip(slices, by_worker, strict=True):
            assert entry["name"] == str(each)
            assert entry["ts"] == pytest.approx(each.start * 1e6)
            assert entry["dur"] == pytest.approx(each.seconds * 1e6)
            assert {**entry["args"], "start": each.start, "end": each.end} == asdict(each)

    @fewer
    @given(timelines)
    def test_memory_is_a_counter_of_each_device(self, timeline: Timeline) -> None:
        entries = json.loads(trace(timeline))["traceEvents"]
        pids = {e["args"]["name"]: e["pid"] for e in entries if e["name"] == "process_name"}
        for device, pid in pids.items():
            stages = {each.stage for each in timeline.events if each.device == device}
            counted = [(e["ts"], e["args"]["bytes"]) for e in entries if e["ph"] == "C" and e["pid"] == pid]
            assert counted == [(pytest.approx(moment * 1e6), size) for moment, size in timeline.held(*stages)]


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
