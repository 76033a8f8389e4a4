"""Freed memory is kept where that was asked for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from streams import keep_memory
from streams._memory import _is_gnu

STEPS = """
import resource, threading, torch
from streams import keep_memory
{}
def steps(number):
    for _ in range(number):
        tensors = [torch.zeros(2**19) for _ in range(48)]
        del tensors
def run():
    steps(5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps(5)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def faults(preparation: str) -> int:
    """How many pages five steps of 96 MiB each have to ask the system for, when five have been before."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(preparation)],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(done.stdout)


@pytest.mark.skipif(not _is_gnu(), reason="needs the GNU C library")
def test_steps_find_the_memory_of_the_ones_before() -> None:
    pages = 5 * 96 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    kept = faults("assert keep_memory()")
    assert kept < pages / 100
    without = faults("")
    if not without:
        pytest.skip("this PyTorch hands no page back even without")
    assert without > 10 * (kept + 1)


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", refuse, raising=False)
    monkeypatch.delattr(ctypes, "CDLL")
    assert keep_memory() is False
