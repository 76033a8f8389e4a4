"""Connections over which nothing is sent end with the process at the other end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from gpipe.distributed._groups import open_groups
from gpipe.distributed._presence import Presence

from ..worlds import world


def _expect_over(presence: Presence) -> bool:
    while not presence.is_over:
        threading.Event().wait(0.01)
    return True


@pytest.mark.parametrize("how", ["ended", "forgotten"])
def test_it_ends_at_both_ends(how: str) -> None:
    with world(2) as ranks:
        assert ranks.run(_end_one, how) == [True, True]


def _end_one(how: str) -> bool:
    presence = Presence(open_groups(None, None), 1 - dist.get_rank())
    if dist.get_rank() == 0:
        return _expect_over(presence)
    if how == "ended":
        presence.end()
        return _expect_over(presence)
    del presence
    return True


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
