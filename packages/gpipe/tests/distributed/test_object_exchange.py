"""Ranks that exit or freeze: all other ranks raise an error that names the lost rank."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import LostRankError, Rank, RemoteError
from gpipe.distributed._tied import TiedTensors

from ..layers import Tied
from ..worlds import world
from .planted import Planted, long_but, planted_in


def expect_named(size: int, whos: Iterable[int], function: Callable[..., str], *arguments: Any) -> None:
    """Expect that ``function(who, *arguments)`` returns, on all other ranks, an error that names ``who``.

    Each of ``whos`` is lost in a separate world. All worlds wait at the same time.
    """
    with ExitStack() as stack:
        opened = {who: stack.enter_context(world(size, 600.0)) for who in whos}
        for who, each in opened.items():
            each.send(function, who, *arguments)
        for who, each in opened.items():
            for succeeded, text in [each.answer(k) for k in {*range(size)} - {who}]:
                assert succeeded, text
                assert text.startswith((f"rank {who} has ended", f"rank {who} failed while it exchanged")), text


def _lose(who: int, phase: str, how: signal.Signals, timeout: float) -> str:
    """Return the error when ``who`` exits or freezes in the second step, or before it if ``phase`` is "agreement"."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), Planted())]
    dist.barrier()  # all ranks are ready before the timeout counts
    rank = Rank(nn.Sequential(*layers), [2, 2, 2], chunks=3, checkpoint="always", timeout=timeout)
    x = torch.randn(6, 6)
    rank.step(x, loss_fn=lambda output: output.square().mean())
    if dist.get_rank() == who:
        planted = planted_in(rank)
        planted.when, planted.how = (phase, 1), how
        if phase == "agreement":
            planted.act()
    for _ in range(2):  # all later steps raise it as well
        with pytest.raises(LostRankError) as caught:
            rank.step(x, loss_fn=lambda output: output.square().mean())
    return str(caught.value)


PHASES = ("agreement", "forward", "recompute", "backward")


@pytest.mark.parametrize("phase", long_but(product(PHASES), ("forward",)))
def test_killed_rank_is_named(phase: str):
    expect_named(3, range(3), _lose, phase, signal.SIGKILL, 60.0)


@pytest.mark.parametrize("phase", long_but(product(PHASES), ("backward",)))
def test_frozen_rank_is_named_after_the_timeout(phase: str):
    expect_named(3, range(3), _lose, phase, signal.SIGSTOP, 4.0)


@pytest.mark.parametrize("lazy", "01")
def test_rank_killed_between_steps_is_named(lazy: str):
    """All ranks name it long before the timeout, even if they found its connections closed earlier, or had none."""
    expect_named(4, (0, 1, 3), _step_after_an_end, lazy)


def _step_after_an_end(who: int, lazy: str) -> str:
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    rank = Rank(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), [1, 1, 1, 1], chunks=3)
    rank.step(torch.randn(6, 6), loss_fn=Tensor.mean)
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    groups = rank._processes._exchange.groups
    while who in groups.peers and not groups.is_closed(who):
        threading.Event().wait(0.01)
    with pytest.raises(LostRankError) as caught:
        rank.step(torch.randn(6, 6), loss_fn=Tensor.mean)
    return str(caught.value)


ADDING = [("step", "is killed"), ("step", "fails")]


@pytest.mark.parametrize("whos", [(0, 1, 2), (0, 2)], ids=["by all", "by two"])
@pytest.mark.parametrize(("when", "how"), long_but([("made", "is killed"), *ADDING], *ADDING))
def test_rank_missing_at_shared_weights_is_named(whos: tuple[int, ...], when: str, how: str):
    """Ranks that wait for a different rank, or share no weight, name it as well."""
    expect_named(3, whos, _share, whos, when, how)


def _share(who: int, sharing: tuple[int, ...], when: str, how: str) -> str:
    first, planted = nn.Linear(6, 6), Planted()
    planted.how = signal.SIGKILL if how == "is killed" else ArithmeticError
    layers = [Tied(first) if k in sharing else nn.Linear(6, 6) for k in range(3)]
    with pytest.MonkeyPatch.context() as patch:

        def begin(what: str) -> None:
            if (dist.get_rank(), what) == (who, when):
                patch.setattr(TiedTensors, "add_up", lambda *_: planted.act())

        with pytest.raises((LostRankError, RemoteError, ArithmeticError)) as caught:
            _make_and_step(layers, begin)
    return str(caught.value)


def _make_and_step(layers: list[nn.Module], begin: Callable[[str], None]) -> None:
    """Create a rank and train two steps: a rank that shares nothing completes the first step without the lost one."""
    begin("made")
    rank = Rank(nn.Sequential(*layers), [1, 1, 1], chunks=3)
    begin("step")
    for _ in range(2):
        rank.step(torch.randn(6, 6), loss_fn=lambda output: output.square().mean())
