"""Run the steps of a part in order, within its time."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from .steps import ROOT, Part, Step

LEAST = 5.0
"""Minimum number of seconds left to start another step."""
GRACE = 5.0
"""Seconds for the stacks of a step that was stopped."""


class Outcome(NamedTuple):
    """The result of a step: a short message, its seconds, its output, and the names of failed tests."""

    step: Step
    words: str
    seconds: float
    output: str
    failures: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return self.words.startswith(("passed", "not run"))


def outcomes(part: Part, log: Path, *, gpu: bool) -> Iterator[Outcome]:
    """Yield the outcome of each step when it has finished, streaming its output to ``log``."""
    end = time.monotonic() + part.seconds
    with log.open("w", encoding="utf-8") as out:
        for step in part.steps:
            start = time.monotonic()
            print(f"\n=== {step.name}: {' '.join(step.command[1:])}", file=out, flush=True)
            begin = out.tell()
            words = _words(step, out, min(step.limit, end - start - GRACE), gpu=gpu)
            out.seek(0, os.SEEK_END)
            output = log.read_bytes()[begin:].decode(errors="replace")
            if words == "":
                words = _counted(output) if step.tests else "passed"
            elif step.tests and words.startswith(("failed", "stopped")):
                words = f"{words}: {_counted(output)}{_running(output)}"
            yield Outcome(step, words, time.monotonic() - start, output, tuple(_failed(output)) if step.tests else ())


def _words(step: Step, out: IO[str], limit: float, *, gpu: bool) -> str:
    """Run a step. Return why it was not run or went wrong; an empty string on success."""
    if importlib.util.find_spec(step.needs) is None:
        return f"not run: no {step.needs}"
    if not gpu:
        return f"not run: no GPU{_found(step)}"
    if limit < LEAST:
        return "not run: no time left"
    status = _run(step, out, limit)
    return f"stopped after {limit:.0f} s" if status is None else f"failed with status {status}" if status else ""


def _run(step: Step, out: IO[str], limit: float) -> int | None:
    """The exit status; None if it had to be stopped, after all of its threads have printed their stacks."""
    child = subprocess.Popen(
        step.command, cwd=ROOT, env=step.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the whole process group
        child.wait()


def _found(step: Step) -> str:
    """Return the number of collected tests, so that a wrong name is detected without a GPU."""
    if not step.tests:
        return ""
    command = [*step.command, "--collect-only", "-q"]
    output = subprocess.run(command, cwd=ROOT, env=step.environment, capture_output=True, text=True).stdout
    found = re.search(r"(\d+)(?:/\d+)? tests? collected", output)
    return f" ({found[1]} tests)" if found else ", and no tests were found"


_TEST = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)


def _counted(output: str) -> str:
    counts = Counter(found[2] for found in _TEST.finditer(output))
    failed = counts["FAILED"] + counts["ERROR"]
    return (
        f"{'failed' if failed else 'passed'}: {counts['PASSED']} passed, {failed} failed, {counts['SKIPPED']} skipped"
    )


def _failed(output: str) -> Iterator[str]:
    return (found[1] for found in _TEST.finditer(output) if found[2] in ("FAILED", "ERROR"))


def _running(output: str) -> str:
    """The test that was running when the output ended."""
    begun = re.findall(r"^(\S+\.py::\S+)(?: |$)", output, re.MULTILINE)
    done = {found[1] for found in _TEST.finditer(output)}
    return f"; in {begun[-1]}" if begun and begun[-1] not in done else ""
