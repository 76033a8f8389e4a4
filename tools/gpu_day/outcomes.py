"""Run steps one after the other, within a time for all of them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from .steps import ROOT, Step, command, environment

ALL = 560.0
"""Seconds for everything."""
LEAST = 5.0
"""Seconds with which it makes sense to begin a step."""


class Outcome(NamedTuple):
    """What came of a step: in a few words, after how many seconds, its output, and the failures of tests by name."""

    step: Step
    words: str
    seconds: float
    output: str
    failures: dict[str, str]

    @property
    def good(self) -> bool:
        return self.words.startswith(("passed", "skipped"))


def outcomes(steps: Sequence[Step], folder: Path, *, gpu: bool) -> Iterator[Outcome]:
    """Of each step, when it is done. Its output is in ``folder`` too."""
    end = time.monotonic() + ALL
    for step in steps:
        start = time.monotonic()
        words, output, failures = _outcome(step, folder, min(step.limit, end - start), gpu=gpu)
        (folder / f"{step.name}.txt").write_text(output, encoding="utf-8")
        yield Outcome(step, words, time.monotonic() - start, output, failures)


def _outcome(step: Step, folder: Path, limit: float, *, gpu: bool) -> tuple[str, str, dict[str, str]]:
    if importlib.util.find_spec(step.needs) is None:
        return f"skipped: no {step.needs}", "", {}
    if limit < LEAST:
        return "skipped: no time left", "", {}
    if not gpu and not step.tests:
        return "skipped: no GPU", "", {}
    report = folder / f"{step.name}.xml"
    status, output = _run(command(step, report, gpu=gpu), limit)
    if not gpu:
        return _selected(status, output), output, {}
    if step.tests and report.exists():
        return _counted(report, status), output, _failures(report)
    return "passed" if status == 0 else _broken(status, limit), output, {}


def _run(arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
    """The exit status, None if it had to be stopped, and the output."""
    child = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=limit)
        return child.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started
        return None, child.communicate()[0]


def _broken(status: int | None, limit: float) -> str:
    return f"stopped after {limit:.0f} s" if status is None else f"failed with status {status}"


def _selected(status: int | None, output: str) -> str:
    found = re.search(r"^(\d+)(?:/\d+)? tests? collected", output, re.MULTILINE)
    if status != 0 or found is None:
        return f"failed: no tests were found (status {status})"
    return f"skipped: no GPU ({found[1]} tests)"


def _counted(report: Path, status: int | None) -> str:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, *rest = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    failed, errors, skipped = rest
    words = f"{total - sum(rest)} passed, {failed + errors} failed, {skipped} skipped"
    return f"passed: {words}" if status == 0 else f"failed: {words}"


def _failures(report: Path) -> dict[str, str]:
    """The failed tests, with the first line of what was wrong."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    wrong = ((case, found) for case in cases for found in (*case.findall("failure"), *case.findall("error")))
    return {f"{c.get('classname')}::{c.get('name')}": (f.get("message") or "").partition("\n")[0] for c, f in wrong}
