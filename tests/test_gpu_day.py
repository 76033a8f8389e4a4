"""A day on a GPU: every step finishes within its part's time, and the page reports its outcome."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools.gpu_day.steps import PARTS, ROOT

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be busy for minutes")


@without_gpu
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "C")) for name in PARTS])
def test_page_lists_steps_without_gpu(name: str, tmp_path: Path) -> None:
    """Tests are collected, so that a wrong name does not waste a GPU's time."""
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_day.sh"), name, str(tmp_path)],
        env={**PARTS[name].steps[0].environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
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
    "offloaded": ("--width", "16", "--layers", "4", "--count", "1"),
    "families": ("GPT-2", "BERT tokens"),
    "whole_loss": ("--width", "16", "--rows", "16", "--tokens", "2", "--steps", "1"),
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
    table = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert table.returncode == 0, table.stdout + table.stderr
    rows = [line for line in table.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 3
    assert len({row.count("|") for row in rows}) == 1


def test_every_program_is_a_step() -> None:
    programs = {path.stem for path in (ROOT / "tools" / "gpu_day" / "programs").glob("[!_]*.py")} - {"common"}
    modules = {step.arguments[1] for part in PARTS.values() for step in part.steps}
    assert programs == set(SMALL) == {name.rpartition(".")[2] for name in modules if ".programs." in name}
