"""The ten minutes of a GPU: every step comes to an end, and the page says what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools.gpu_day import outcomes as running
from tools.gpu_day.outcomes import ALL, Outcome, outcomes
from tools.gpu_day.page import page
from tools.gpu_day.steps import ROOT, STEPS, Step, command

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be busy for minutes")


def one_test(folder: Path, body: str) -> Step:
    """A step that runs one test."""
    file = folder / "test_one.py"
    file.write_text(f"import pytest, time\n\n@pytest.mark.cuda\ndef test_one():\n    {body}\n", encoding="utf-8")
    options = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "--rootdir", str(folder))
    return Step("one", "One test", ("-m", "pytest", *options, str(file)), 60, tests=True, needs="pytest")


def run(step: Step, folder: Path, *, gpu: bool = True) -> Outcome:
    (found,) = outcomes([step], folder, gpu=gpu)
    assert (folder / f"{step.name}.txt").read_text(encoding="utf-8") == found.output
    return found


def test_all_steps_fit_into_the_time() -> None:
    """The last ones get what is left; the tests, before them, have time for most of what they may take."""
    assert ALL < 570
    assert sum(step.limit for step in STEPS if step.tests) < ALL


@pytest.mark.parametrize(
    ("body", "words", "good"),
    [
        ("pass", "passed: 1 passed, 0 failed, 0 skipped", True),
        ("pytest.skip('why')", "passed: 0 passed, 0 failed, 1 skipped", True),
        ("assert 1 == 2", "failed: 0 passed, 1 failed, 0 skipped", False),
    ],
)
def test_tests_are_counted_and_failures_named(body: str, words: str, good: bool, tmp_path: Path) -> None:
    found = run(one_test(tmp_path, body), tmp_path)
    assert (found.words, found.good) == (words, good)
    assert [name.rpartition("::")[2] for name in found.failures] == [] if good else ["test_one"]
    assert good or "assert 1 == 2" in page([found])
    assert (tmp_path / "one.xml").exists()


def test_what_hangs_is_stopped_with_what_it_has_started(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'], stdin=-1)"
    step = Step("hangs", "Hangs", ("-c", f"import time; print('begun', flush=True); {code}; time.sleep(99)"), 6)
    found = run(step, tmp_path)
    assert found.words == "stopped after 6 s"
    assert "begun" in page([found])


@pytest.mark.parametrize(
    ("code", "words"), [("print('| a |')", "passed"), ("raise SystemExit(3)", "failed with status 3")]
)
def test_programs_are_shown(code: str, words: str, tmp_path: Path) -> None:
    found = run(Step("program", "A program", ("-c", code), 60), tmp_path)
    assert found.words == words
    assert words != "passed" or "## A program\n\n| a |\n" in page([found])


def test_what_is_missing_or_too_late_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Step("x", "X", ("-c", ""), 60, needs="not_there"), tmp_path).words == "skipped: no not_there"
    assert run(Step("x", "X", ("-c", ""), 60), tmp_path, gpu=False).words == "skipped: no GPU"
    monkeypatch.setattr(running, "ALL", 1.0)
    assert run(Step("x", "X", ("-c", ""), 60), tmp_path).words == "skipped: no time left"


@pytest.mark.long  # an interpreter for each step
@without_gpu
def test_without_a_gpu_it_runs_to_the_end(tmp_path: Path) -> None:
    """Every step finds its tests, so that a GPU's time is not spent on a wrong name."""
    script = ROOT / "tools" / "gpu_day.sh"
    done = subprocess.run(
        ["bash", str(script), str(tmp_path)],
        env={**running.environment(), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    for step in STEPS:
        assert f"| {step.title} | skipped: no " in written
        assert (tmp_path / f"{step.name}.txt").exists()
    assert written.count(" tests) | ") == sum(step.tests for step in STEPS)


def test_every_test_of_a_gpu_in_gpipe_is_in_one_step() -> None:
    chosen = [step.arguments[-1] for step in STEPS if "packages/gpipe/tests/test_cuda.py" in step.arguments]
    assert chosen[2] == f"not ({chosen[0]} or {chosen[1]})"


def test_reports_of_tests_are_only_asked_for_where_there_is_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "x.xml"
    assert f"--junitxml={report}" in command(STEPS[0], report, gpu=True)
    assert "--collect-only" in command(STEPS[0], report, gpu=False)


@pytest.mark.long
def test_the_transformer_fills_its_table() -> None:
    arguments = ["-m", "tools.gpu_day.transformer", "--width", "16", "--length", "2", "--rows", "8", "--steps", "1"]
    table = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=running.environment(), capture_output=True, text=True, timeout=200
    )
    assert table.returncode == 0, table.stderr
    rows = table.stdout.splitlines()
    assert len(rows) == 2 + 2 * 4
    assert {row.count("|") for row in rows} == {7}
