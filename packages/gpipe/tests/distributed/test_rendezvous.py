"""Ranks that end or freeze: all others hear of it, and who it was."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe.distributed import LostRankError, Rank, RemoteError
from gpipe.distributed._tied import Twins

from ..worlds import world

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
]


class Meets(nn.Module):
    """Its process gets a signal in one phase of one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.when: tuple[str, int] | None = None
        self.signal = signal.SIGKILL

    def forward(self, x: Tensor) -> Tensor:
        phase = "recompute" if gpipe.is_recomputing() else "forward"
        microbatch = gpipe._current.current.microbatch
        if (phase, microbatch) == self.when:
            self._end()
        if ("backward", microbatch) == self.when and x.requires_grad:
            x.register_hook(lambda gradient: self._end())
        return x * 1.0

    def _end(self) -> None:
        os.kill(os.getpid(), self.signal)


def _lose(who: int, phase: str, microbatch: int, number: int, timeout: float) -> str:
    """What a rank gets when ``who`` ends, or freezes, in the second step; in "agreement" between the two."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), Meets())]
    dist.barrier()  # all are there before the timeout counts
    rank = Rank(nn.Sequential(*layers), [2, 2, 2], chunks=3, checkpoint="always", timeout=timeout)
    x = torch.randn(6, 6)
    rank.step(x, loss_fn=lambda output: output.square().mean())
    if dist.get_rank() == who:
        meets = rank.partitions[0][1]
        meets.when, meets.signal = (phase, microbatch), signal.Signals(number)
        if phase == "agreement":
            meets._end()
    try:
        rank.step(x, loss_fn=lambda output: output.square().mean())
    except LostRankError as error:
        with pytest.raises(LostRankError, match="rank"):  # for good
            rank.step(x, loss_fn=lambda output: output.square().mean())
        return str(error)
    raise AssertionError("the step has not failed")


PHASES = ("agreement", "forward", "recompute", "backward")


def cases(*short: tuple[int, str]) -> list[Any]:
    """Each rank and phase; all but some take long together."""
    return [
        pytest.param(who, phase, marks=[] if (who, phase) in short else pytest.mark.long)
        for who in range(3)
        for phase in PHASES
    ]


@pytest.mark.parametrize(("who", "phase"), cases((1, "forward")))
def test_a_rank_that_is_killed_is_named(who: int, phase: str):
    _expect_named(who, phase, signal.SIGKILL, timeout=60.0)


@pytest.mark.parametrize(("who", "phase"), cases((1, "backward")))
def test_a_rank_that_freezes_is_named_when_the_time_is_over(who: int, phase: str):
    _expect_named(who, phase, signal.SIGSTOP, timeout=4.0)


def _expect_named(who: int, phase: str, number: signal.Signals, timeout: float) -> None:
    with world(3, 60.0) as ranks:
        for connection in ranks.connections:
            connection.send((_lose, (who, phase, 1, int(number), timeout)))
        told = [ranks.answer(k) for k in range(3) if k != who]
    for succeeded, text in told:
        assert succeeded, text
        assert text.startswith(f"rank {who} has ended, or did not answer within {timeout:g} s")


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_has_ended_between_two_steps_is_named_by_all(who: int):
    """Long before the timeout, and also by those that have found its connections closed before their step."""
    with world(4, 1800.0) as ranks:
        for connection in ranks.connections:
            connection.send((_step_after_an_end, (who,)))
        told = [ranks.answer(k) for k in range(4) if k != who]
    for succeeded, text in told:
        assert succeeded, text
        assert text.startswith(f"rank {who} has ended")


def _step_after_an_end(who: int) -> str:
    rank = Rank(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), [1, 1, 1, 1], chunks=3)
    rank.step(torch.randn(6, 6), loss_fn=Tensor.mean)
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    while not rank._processes._groups.is_closed(who):
        threading.Event().wait(0.01)
    with pytest.raises(LostRankError) as caught:
        rank.step(torch.randn(6, 6), loss_fn=Tensor.mean)
    return str(caught.value)


class Shares(nn.Module):
    """A layer whose weight all ranks have."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _step_sharing(by_all: bool) -> None:
    """Two steps: a rank that shares nothing gets to the end of the first one, whoever is missing there."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 6))
    middle = Shares(weight) if by_all else nn.Linear(6, 6)
    rank = Rank(nn.Sequential(Shares(weight), middle, Shares(weight)), [1, 1, 1], chunks=3)
    for _ in range(2):
        rank.step(torch.randn(6, 6), loss_fn=lambda output: output.square().mean())


SHARED = [("spread_values", "is killed"), ("add_up", "is killed"), ("add_up", "fails")]


@pytest.mark.parametrize(
    ("who", "what", "how", "by_all"),
    [
        pytest.param(who, what, how, by_all, marks=[] if (who, what) == (2, "add_up") else pytest.mark.long)
        for what, how in SHARED
        for who, by_all in ((0, True), (1, True), (2, True), (0, False), (2, False))
    ],
)
def test_who_is_missing_where_weights_are_shared_is_named(who: int, what: str, how: str, by_all: bool):
    """Also by ranks that wait there for others than that one, or do not come there, as they share nothing."""
    with world(3, 60.0) as ranks:
        answers = ranks.answers(_share, who, what, how, by_all, limit=40.0)
    for k in {0, 1, 2} - {who}:
        succeeded, text = answers[k]
        assert succeeded, text
        assert text.startswith(f"rank {who} has ended")


def _share(who: int, what: str, how: str, by_all: bool) -> str:
    def end(*_: Any) -> None:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("planted")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == who:
            patch.setattr(Twins, what, end)
        with pytest.raises((LostRankError, RemoteError, ArithmeticError)) as caught:
            _step_sharing(by_all)
    return str(caught.value)


class Waits(nn.Module):
    """Waits, when it is told to, for so many seconds, as a layer does for something that does not come in time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        threading.Event().wait(self.seconds)
        return x * 1.0


@pytest.mark.long
@pytest.mark.parametrize("who", range(3))
def test_a_rank_that_is_slower_than_the_timeout_is_named_on_all(who: int):
    """On itself too, when it goes on; nobody hears of connections that gloo has ended."""
    with world(3, 60.0) as ranks:
        for text in ranks.run(_be_slow, who, 8.0):
            assert text.startswith(f"rank {who} has ended, or did not answer within 8 s")


def _be_slow(who: int, timeout: float) -> str:
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), Waits())]
    dist.barrier()
    rank = Rank(nn.Sequential(*layers), [2, 2, 2], chunks=3, timeout=timeout)
    x = torch.randn(6, 6)
    rank.step(x, loss_fn=lambda output: output.square().mean())
    if dist.get_rank() == who:
        rank.partitions[0][1].seconds = 4 * timeout
    for _ in range(2):
        with pytest.raises(LostRankError) as caught:
            rank.step(x, loss_fn=lambda output: output.square().mean())
    return str(caught.value)
