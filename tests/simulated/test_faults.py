"""Every wait, event, recorded stream and change of streams is needed: without it, a case of the matrix fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

import gpipe

from .accelerator import found
from .faults import Fault, planted
from .models import assert_trains_like, counted_squares, model, piped, squares
from .races import ROOT

# Of torch, once a process: with nodes that are kept it has to order streams.
pytestmark = [pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")]

COPY, RUN = "gpipe.transport._copy", "gpipe.engine._run"


class Case(NamedTuple):
    """One of the matrix."""

    placement: str
    how: str = "call"
    streams: str = "own"
    mode: str = "never"
    inline: bool = False
    counted: bool = False
    keeps_nodes: bool = False

    def __str__(self) -> str:
        threads = "inline" if self.inline else "threads"
        how = f"{self.how} with a counted loss" if self.counted else self.how
        how += " and kept nodes" * self.keeps_nodes
        return f"{self.placement}, {how}, {self.streams} streams, checkpoint={self.mode}, {threads}"

    def races(self) -> list[str]:
        """What the case finds, an unequal gradient too."""
        found()
        try:
            pipe = piped(model(), self.placement, self.mode)
            # Nodes belong to the stream on which they were made, here the default one.
            kept = [p.view_as(p).grad_fn.next_functions for p in pipe.parameters() if self.keeps_nodes]
            loss_fn = counted_squares if self.counted else squares
            assert_trains_like(model(), pipe, self.how, self.streams, inline=self.inline, loss_fn=loss_fn)
            del kept
        except (AssertionError, RuntimeError) as error:
            return [str(error), *(str(race) for race in found())]
        return [str(race) for race in found()]


TWO, THREE, BETWEEN = Case("two devices"), Case("three devices"), Case("CPU between")
FOREIGN = Case("three devices", streams="foreign")

FAULTS: list[tuple[Fault, Case, str]] = [
    (
        Fault(
            "a copy does not wait for what computes its source",
            COPY,
            "wait_stream(source.copy, source.compute)",
            "pass",
        ),
        TWO,
        r"READ by copy D2D on .* not ordered after",
    ),
    (
        Fault(
            "the target's copy stream is not current during a copy",
            COPY,
            "with use_stream(target.copy), use_stream(source.copy):",
            "with use_stream(source.copy):",
        ),
        TWO,
        r"not ordered after",
    ),
    (
        Fault(
            "the source's copy stream is not current during a copy",
            COPY,
            "with use_stream(target.copy), use_stream(source.copy):",
            "with use_stream(target.copy):",
        ),
        BETWEEN,
        r"not ordered after",
    ),
    (
        Fault(
            "the source of a copy is not recorded with its stream",
            COPY,
            "_each(payload, lambda tensor: recorded(tensor, source.copy))",
            "pass",
        ),
        TWO,
        r"FREE of memory of .* not ordered after copy D2D .*no record_stream",
    ),
    (
        Fault(
            "the event of a copy is recorded where nothing is copied",
            COPY,
            "record_event(last)",
            "record_event(self._source.compute)",
        ),
        TWO,
        r"READ by .* not ordered after copy D2D",
    ),
    (
        Fault("the target does not wait for a copy", COPY, "wait_event(compute, event)", "pass"),
        TWO,
        r"READ by .* not ordered after copy D2D",
    ),
    (
        Fault("the host does not wait for a copy to it", COPY, "wait_event(compute, event)", "pass"),
        BETWEEN,
        r"READ by .* on the host not ordered after copy D2H",
    ),
    (
        Fault(
            "what was copied is not recorded with the stream that reads it",
            COPY,
            "return _each(payload, lambda tensor: recorded(tensor, compute))",
            "return payload",
        ),
        TWO,
        r"FREE of memory of .* not ordered after .*no record_stream",
    ),
    (
        Fault(
            "workers compute on the default streams",
            "gpipe.engine._workers",
            "with use_stream(self.stream), serving(sections):",
            "with serving(sections):",
        ),
        TWO,
        r"not ordered after",
    ),
    (
        Fault("a backward does not wait for the caller", RUN, "_all_wait(self._streams, now)", "pass"),
        FOREIGN,
        r"not ordered after",
    ),
    (
        Fault(
            "the caller does not wait after a backward",
            RUN,
            "            _all_wait(now, self._streams)",
            "            pass",
        ),
        FOREIGN,
        r"not ordered after",
    ),
    (
        Fault(
            "an inline run stays on the streams of its caller",
            RUN,
            "with use_stream(self._stream_of[stage.stage.index]):",
            "if True:",
        ),
        Case("three devices", streams="foreign", mode="always", inline=True),
        r"not ordered after",
    ),
    (
        Fault(
            "gradients for several devices begin on the stream of one",
            "gpipe.engine._autograd_calls",
            "_on_current_streams(roots)",
            "list(roots)",
        ),
        Case("three devices", how="1f1b", counted=True, keeps_nodes=True),
        r"not ordered after",
    ),
]


@pytest.mark.parametrize("case", {case: None for _, case, _ in FAULTS}, ids=str)
def test_without_faults_there_are_no_races(case: Case):
    assert case.races() == []


@pytest.mark.parametrize(("fault", "case", "race"), FAULTS, ids=[fault.name for fault, *_ in FAULTS])
def test_each_fault_is_found(fault: Fault, case: Case, race: str):
    with planted(fault):
        races = case.races()
    assert any(re.search(race, each) for each in races), races[:5]


ORDERS = re.compile(r"\b(wait_stream|wait_event|record_event|recorded|use_stream|_all_wait|_on_current_streams)\(")


def test_every_line_that_orders_is_taken_away_once():
    planted_lines = [fault.line for fault, *_ in FAULTS]
    for folder in ("transport", "engine"):
        for file in (Path(gpipe.__file__).parent / folder).glob("*.py"):
            for line in file.read_text().splitlines():
                if ORDERS.search(line) and not line.lstrip().startswith("def "):
                    known = any(each.strip() in line for each in [*planted_lines, *INSIDE])
                    assert known, f"{file.name}: {line.strip()}"


INSIDE = ["wait_stream(source, target)"]
"""What functions do whose calls are taken away."""


def table() -> str:
    """The list as docs/accelerators.md shows it."""
    rows = [f"| {fault.name} | {_place(fault)} | {case} |" for fault, case, _ in FAULTS]
    return "\n".join(["| what is wrong | where | the case that finds it |", "|---|---|---|", *rows])


def _place(fault: Fault) -> str:
    return f"`{fault.module.replace('.', '/')}.py`"


def test_the_documentation_has_them_all():
    page = (ROOT / "docs/accelerators.md").read_text()
    assert f"<!-- begin: faults -->\n\n{table()}\n\n<!-- end: faults -->" in page, table()
