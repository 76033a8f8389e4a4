"""Freed memory is kept where that was asked for."""

import os
import platform

import pytest

from .fakes import in_fresh_process

STEPS = """
import resource, threading, torch
from streams import keep_memory

def steps(number):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(number):
        tensors = [torch.zeros(2**19) for _ in range(48)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    steps(5)
    print(steps(5))

for prepare in (lambda: True, keep_memory):
    assert prepare()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_steps_find_the_memory_of_the_ones_before() -> None:
    """By how many pages five steps of 96 MiB each have to ask the system for, when five have been before."""
    done = in_fresh_process(STEPS)
    assert not done.stderr
    without, kept = map(int, done.stdout.split())
    pages = 5 * 96 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert kept < pages / 100
    if not without:
        pytest.skip("this PyTorch hands no page back even without")
    assert without > 10 * (kept + 1)
