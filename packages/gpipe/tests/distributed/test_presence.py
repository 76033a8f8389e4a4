"""Connections over which nothing is sent end with the process at the other end."""

from __future__ import annotations

import threading

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
