"""A day on a GPU: every step comes to an end within the time of its part, and the page says what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools.gpu_day import outcomes as running
from tools.gpu_day.outcomes import Outcome, outcomes
from tools.gpu_day.page import page
from tools.gpu_day.steps import PARTS, ROOT, Part, Step

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be busy for minutes")


def some_tests(folder: Path, *bodies: str) -> Step:
    """A step that runs a test for each body."""
    file = folder / "test_some.py"
    tests = "".join(f"\ndef test_{k}():\n    {body}\n" for k, body in enumerate(bodies))
    file.write_text(f"import pytest, time\n{tests}", encoding="utf-8")
    options = ("-v", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "--rootdir", str(folder))
    return Step("some", "Some tests", ("-m", "pytest", *options, str(file)), 60, tests=True, needs="pytest")


def run(step: Step, folder: Path, *, gpu: bool = True, seconds: float = 100) -> Outcome:
    (found,) = outcomes(Part("One", seconds, (step,)), folder / "log.txt", gpu=gpu)
    assert (folder / "log.txt").read_text(encoding="utf-8").endswith(found.output)
    return found


@pytest.mark.parametrize("name", PARTS)
def test_the_limits_of_a_part_add_up_to_less_than_ten_minutes(name: str) -> None:
    part = PARTS[name]
    assert sum(step.limit for step in part.steps) <= part.seconds - 5 * len(part.steps)
    assert part.seconds <= 570


@pytest.mark.parametrize(
    ("bodies", "words", "failures"),
    [
        (("pass", "pytest.skip('why')"), "passed: 1 passed, 0 failed, 1 skipped", []),
        (("pass", "assert 1 == 2"), "failed with status 1: failed: 1 passed, 1 failed, 0 skipped", ["test_1"]),
    ],
)
def test_tests_are_counted_and_failures_named(
    bodies: tuple[str, ...], words: str, failures: list[str], tmp_path: Path
) -> None:
    found = run(some_tests(tmp_path, *bodies), tmp_path)
    assert (found.words, found.good) == (words, not failures)
    assert [name.rpartition("::")[2] for name in found.failures] == failures
    assert not failures or "assert 1 == 2" in page("A", [found])


def test_what_hangs_is_stopped_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LEAST", 0)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    found = run(Step("hangs", "Hangs", ("-c", f"print('begun', flush=True); {code}"), 3), tmp_path)
    assert found.words == "stopped after 3 s"
    assert "begun" in page("A", [found])


def test_what_is_missing_or_too_late_is_not_run(tmp_path: Path) -> None:
    step = Step("x", "X", ("-c", ""), 60)
    assert run(step._replace(needs="not_there"), tmp_path).words == "not run: no not_there"
    assert run(step, tmp_path, gpu=False).words == "not run: no GPU"
    assert run(step, tmp_path, seconds=1).words == "not run: no time left"


@without_gpu
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in "AB")) for name in PARTS])
def test_without_a_gpu_the_page_says_what_would_run(name: str, tmp_path: Path) -> None:
    """Steps of tests are looked for, so that a GPU's time is not spent on a wrong name."""
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_day.sh"), name, str(tmp_path)],
        env={**PARTS[name].steps[0].environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    for step in PARTS[name].steps:
        assert f"| {step.title} | not run: no " in written
    assert written.count(" tests) | ") == sum(step.tests for step in PARTS[name].steps)
    assert len([*tmp_path.iterdir()]) <= 8


SMALL = {
    "waits": ("--width", "16"),
    "group": (),
    "launches": ("--seconds", "0.1", "--count", "1"),
    "peaks": ("--width", "16", "--rows", "2"),
    "copies": ("--width", "16", "--rows", "16", "--count", "1"),
    "out_of_memory": (),
    "ranks": (),
    "transformer": ("--width", "16", "--length", "2", "--rows", "8", "--steps", "1"),
    "compiled": ("--width", "16", "--count", "1"),
    "plans": ("--width", "32", "--length", "2", "--rows", "8"),
    "families": ("GPT-2", "BERT tokens"),
}
"""Each program with arguments that make it short."""


@pytest.mark.long
@without_gpu
@pytest.mark.parametrize("name", SMALL)
def test_each_program_fills_its_table_on_the_cpu(name: str) -> None:
    steps = {step.arguments[1].rpartition(".")[2]: step for part in PARTS.values() for step in part.steps}
    pytest.importorskip(steps[name].needs)
    command = [sys.executable, "-m", f"tools.gpu_day.programs.{name}", *SMALL[name]]
    environment = PARTS["A"].steps[0].environment
    table = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert table.returncode == 0, table.stdout + table.stderr
    rows = [line for line in table.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 3
    assert len({row.count("|") for row in rows}) == 1


def test_every_program_is_a_step_and_is_tried_small() -> None:
    programs = {path.stem for path in (ROOT / "tools" / "gpu_day" / "programs").glob("[!_]*.py")} - {"common"}
    modules = {step.arguments[1] for part in PARTS.values() for step in part.steps}
    assert programs == set(SMALL) == {name.rpartition(".")[2] for name in modules if ".programs." in name}
