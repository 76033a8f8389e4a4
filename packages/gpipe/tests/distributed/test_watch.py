"""Transfers that will never be done are ended."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from gpipe.distributed._errors import UnreachableError
from gpipe.distributed._watch import Watch


class Group:
    """Of which only the end is seen."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def abort(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()


class Transfer:
    """Done once it has been looked at so many times."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Ranks:
    """Connections, of which those to some members are closed."""

    def __init__(self, seconds: float, closed: set[int]) -> None:
        self.timeout = timedelta(seconds=seconds)
        self.closed = closed
        self.ended = threading.Event()

    def wait_closed(self, member: int) -> None:
        if member not in self.closed:
            self.ended.wait()

    def end(self) -> None:
        self.ended.set()


FOR_EVER = float("inf")


def watch(ranks: Ranks, groups: list[Group]) -> Watch:
    found = Watch(ranks)  # type: ignore[arg-type]
    for member, group in enumerate(groups, 2):
        found.own(group, member)  # type: ignore[arg-type]
    return found


def test_all_communicators_end_when_nothing_comes():
    groups = [Group(), Group()]
    watched = watch(Ranks(0.01, set()), groups)
    watched.check()
    watched.add([Transfer(1), Transfer(FOR_EVER)], 3)
    for group in groups:
        assert group.ended.wait(300)
    with pytest.raises(UnreachableError) as raised:
        watched.check()
    assert (raised.value.member, raised.value.silent) == (3, True)


def test_all_communicators_end_when_somebody_has_ended():
    """Also the connections to others, whose devices may wait for this one."""
    groups, ranks = [Group(), Group()], Ranks(1e6, {2})
    watched = watch(ranks, groups)
    watched.add([Transfer(FOR_EVER)], 3)
    for group in groups:
        assert group.ended.wait(300)
    assert ranks.ended.is_set()
    with pytest.raises(UnreachableError) as raised:
        watched.check()
    assert (raised.value.member, raised.value.silent) == (2, False)


def test_who_ends_when_nothing_is_under_way_does_no_harm():
    """As processes that have done all their steps do, one after the other."""
    groups = [Group()]
    watched = watch(Ranks(1e6, {2}), groups)
    watched.add([Transfer(0)], 2)
    thread = watched._thread
    if thread is not None:
        thread.join(300)
    watched.check()
    assert not groups[0].ended.is_set()
