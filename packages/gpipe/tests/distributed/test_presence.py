"""Connections over which nothing is sent end with the process at the other end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from gpipe.distributed._groups import open_groups
from gpipe.distributed._presence import Presence

from ..worlds import world


def _opened() -> Presence:
    """A connection to the other rank of two."""
    return Presence(open_groups(None, None), 1 - dist.get_rank())


def _expect_over(presence: Presence) -> bool:
    while not presence.is_over:
        threading.Event().wait(0.01)
    return True


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process(number: signal.Signals) -> None:
    with world(2) as ranks:
        answers = ranks.answers(_end_process, number, limit=60.0)
    assert answers == [(True, True), (False, "the process has ended")]


def _end_process(number: signal.Signals) -> bool:
    dist.barrier()
    presence = Presence(open_groups(None, timedelta(seconds=5)), 1 - dist.get_rank())
    threading.Event().wait(6.0)  # longer than the ranks wait for each other
    assert not presence.is_over
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    return _expect_over(presence)


@pytest.mark.parametrize("how", ["ended", "forgotten"])
def test_it_ends_at_both_ends(how: str) -> None:
    with world(2) as ranks:
        assert ranks.run(_end_one, how) == [True, True]


def _end_one(how: str) -> bool:
    presence = _opened()
    if dist.get_rank() == 0:
        return _expect_over(presence)
    if how == "ended":
        presence.end()
        return _expect_over(presence)
    del presence
    return True


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists")
@pytest.mark.parametrize("count", [pytest.param(1000, marks=[pytest.mark.long])])
def test_many_leave_nothing_behind(count: int) -> None:
    """Neither threads nor open files."""
    with world(2) as ranks:
        assert ranks.answers(_open_many, count, limit=500.0) == [(True, (0, 0))] * 2


def _open_many(count: int) -> tuple[int, int]:
    counts = []
    for _ in range(count):
        presence = _opened()
        presence.end()
        del presence
        gc.collect()
        dist.barrier()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts[-1][0] - counts[0][0], counts[-1][1] - counts[0][1]


ENDS = """
import sys, torch.distributed as dist
from gpipe.distributed._groups import open_groups
from gpipe.distributed._presence import Presence
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
presence = Presence(open_groups(None, None), 1 - dist.get_rank())
while dist.get_rank() == 0 and not presence.is_over:
    pass
sys.exit(3)
"""


def test_a_process_ends_that_has_not_ended_its_own(tmp_path: Path) -> None:
    """At its exit, and though the other one is still there."""
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store")]
    children = [subprocess.Popen([*command, str(k)]) for k in range(2)]
    try:
        assert [child.wait(300) for child in children] == [3, 3]
    finally:
        for child in children:
            child.kill()
            child.wait()
