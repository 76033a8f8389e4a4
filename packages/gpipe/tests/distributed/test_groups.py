"""The connections of ranks are private: other process groups do not interfere, and they end with the ranks."""

import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import GradScaler, LostRankError, Rank, _groups, average_gradients, broadcast_batches, load, save
from gpipe.distributed._messages import RemoteLink

from ..worlds import world
from .planted import expect_gradients, mesh_of_four
from .test_object_exchange import expect_named


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _expect_right(rank: Rank) -> None:
    """Expect that the gradients of a step match the plain model's gradients."""
    plain, x = _model(), torch.arange(24.0).reshape(6, 4)
    plain(x).square().mean().backward()
    rank.zero_grad()
    rank.step(x, loss_fn=lambda output: output.square().mean())
    expect_gradients(rank, plain)


def _group(members: list[int]) -> Any:
    """Return a group that only its members create, and None on other ranks."""
    if dist.get_rank() not in members:
        return None
    return dist.new_group(members, backend="gloo", use_local_synchronization=True)


def test_groups_of_some_processes_do_not_interfere(tmp_path: Any) -> None:
    """They are created and destroyed before ranks, between them, and before a save. Open ranks stay correct."""
    with world(3, timeout=10.0) as ranks:
        ranks.run(_make_among_others, str(tmp_path / "checkpoint"))


def _make_among_others(path: str) -> None:
    others = [_group([0, 1]), _group([0])]
    made = [Rank(_model(), [1, 1, 1], chunks=2)]
    _expect_right(made[0])
    if others[0] is not None:
        dist.destroy_process_group(others[0])
    others.append(_group([1]))
    for _ in range(2):
        made.append(Rank(_model(), [1, 1, 1], ranks=[2, 0, 1], chunks=2))
        others.append(_group([2]))
    for each in reversed(made):
        _expect_right(each)
    save(path, made[0])
    load(path, made[0])
    _expect_right(made[0])


def test_using_a_closed_rank_raises(worlds: Any) -> None:
    """The error says that it was closed. Its parameters stay, and other ranks of these processes still work."""
    worlds(2).run(_close_one)


def _close_one() -> None:
    closed, other = Rank(_model(), [2, 1], chunks=2), Rank(_model(), [2, 1], chunks=2)
    _expect_right(closed)
    for _ in range(2):
        closed.close()
    optimizer = torch.optim.SGD(closed.parameters())
    uses = [(each, torch.zeros(6, 4)) for each in (closed, closed.step, partial(closed.evaluate, loss_fn=Tensor.mean))]
    for use, given in (*uses, (closed.clip_grad_norm_, 1.0), (GradScaler(closed).unscale_, optimizer)):
        with pytest.raises(RuntimeError, match="was closed"):
            use(given)
    assert closed.stages == other.stages == [dist.get_rank()]
    assert all(p.grad is not None for p in closed.parameters())
    torch.testing.assert_close(closed.state_dict(), other.state_dict())
    _expect_right(other)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts threads and files in /proc")
@pytest.mark.parametrize(
    ("count", "closes"),
    [(12, True), (12, False), pytest.param(1000, True, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_many_ranks_leak_nothing(worlds: Any, count: int, closes: bool) -> None:
    """No thread or open file is left, even if ranks are deleted without being closed."""
    opened = worlds(2)
    for succeeded, grown in opened.answers(_make_and_leave, count, closes, limit=800.0):
        assert succeeded, grown
        assert max(grown) <= 0  # fewer if an earlier test has left some


def _make_and_leave(count: int, closes: bool) -> tuple[int, int]:
    """Return how many more threads and open files there are after ``count`` ranks than after one."""
    held, before = [], (0, 0)
    for k in range(count):
        rank = Rank(_model(), [2, 1], chunks=2)
        _expect_right(rank)
        if closes:
            rank.close()
            held.append(rank)
        del rank
        if not closes:
            gc.collect()
        if k == 0:
            before = _opened()
    threads, files = _opened()
    return threads - before[0], files - before[1]


def _opened() -> tuple[int, int]:
    dist.barrier()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.path.isfile("/proc/self/statm"), reason="reads the memory in use from /proc")
def test_steps_of_varying_lengths_leak_nothing() -> None:
    with world(2) as opened:
        for succeeded, grown in opened.answers(_train_for_long, 2000, limit=800.0):
            assert succeeded, grown
            assert grown[0] <= 0
            assert grown[1] <= 0
            assert grown[2] < 2**26  # the C library keeps some, more on a busy machine; 40 KiB per step is detected


def _train_for_long(steps: int) -> list[int]:
    """Return the growth of threads, open files and bytes of memory between a quarter of the steps and the end."""
    rank, found = Rank(_model(), [2, 1], chunks=2), []
    for k in range(steps):
        x = torch.ones(4, 1 + 37 * k % 19973, 4)  # small and large messages
        rank.step(x, loss_fn=Tensor.mean)
        if k + 1 in (steps // 4, steps):
            found.append(
                [*_opened(), int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")]
            )
    return [after - before for before, after in zip(*found, strict=True)]


def test_rank_that_does_not_connect_is_named() -> None:
    expect_named(3, [1], _make_without)


def _make_without(who: int) -> str:
    Rank(_model(), [1, 1, 1], chunks=2)
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRankError, match="did not reach this call within 3 s") as caught:
        Rank(_model(), [1, 1, 1], chunks=2, timeout=3.0)
    return str(caught.value)


def test_interrupt_during_exchange_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """The interrupted rank does not read remaining messages of that exchange later."""
    with world(2) as opened:
        (told, later), interrupted = opened.run(_interrupted, str(tmp_path / "checkpoint"))
        assert told.startswith("LostRankError: rank 1 failed while it exchanged messages")
        assert later.startswith("LostRankError: rank 1 failed while it exchanged messages")
        assert [each.split(":")[0] for each in interrupted] == ["KeyboardInterrupt", "LostRankError"]


def _interrupted(path: str) -> list[str]:
    model, found = _model(), []
    save(path, model)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(RemoteLink, "receive", _interrupt)
        for _ in range(2):
            with pytest.raises((KeyboardInterrupt, LostRankError)) as caught:
                save(path, model)
            found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def _interrupt(link: RemoteLink) -> None:
    raise KeyboardInterrupt


OTHER_CALLS = ["step", "evaluate", "forward", "clip", "save", "load", "average", "read"]


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_creating_a_rank_during_another_call_raises(worlds: Any, tmp_path: Path, call: str) -> None:
    """All ranks raise within seconds. Afterwards they can create a rank, or use the previous one."""
    for who in range(2):
        for text, seconds in worlds(2).run(_create_instead, str(tmp_path / "run"), call, who):
            assert "the method that is called is" in text
            assert "'Rank'" in text
            assert seconds < 20.0  # the timeout is 30


def _create_instead(path: str, call: str, who: int) -> tuple[str, float]:
    rank, x = Rank(_model(), [2, 1], chunks=2), torch.ones(6, 4)
    save(path, rank)
    _expect_right(rank)
    calls = {
        "step": partial(rank.step, x, loss_fn=Tensor.mean, reduction="mean"),
        "evaluate": partial(rank.evaluate, x, loss_fn=Tensor.mean, reduction="mean"),
        "forward": partial(rank, x),
        "clip": partial(rank.clip_grad_norm_, 1.0),
        "save": partial(save, path, rank),
        "load": partial(load, path, rank),
        "average": partial(average_gradients, rank),
        "read": lambda: next(broadcast_batches([x], rank)),
    }
    began = time.monotonic()
    with pytest.raises(ValueError, match="the ranks disagree") as caught:
        Rank(_model(), [2, 1], chunks=2) if dist.get_rank() == who else calls[call]()
    seconds = time.monotonic() - began
    _expect_right(rank)
    _expect_right(Rank(_model(), [2, 1], chunks=2))
    if call != "average":  # these ranks are not replicas
        calls[call]()
    return str(caught.value), seconds


@pytest.mark.parametrize("closes", [False, True])
def test_rank_may_be_created_late(worlds: Any, closes: bool) -> None:
    """The others wait, even if the previous rank was closed on one process only."""
    worlds(2).run(_create_late, closes)


def _create_late(closes: bool) -> None:
    rank = Rank(_model(), [2, 1], chunks=2)
    _expect_right(rank)
    count = _groups._count(dist.group.WORLD, 0, 0)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_groups, "_MOMENT", 0.0)
        if dist.get_rank() == 1:
            while _groups._count(dist.group.WORLD, 0, 0) == count:
                threading.Event().wait(0.01)
            if closes:
                rank.close()
        new = Rank(_model(), [2, 1], chunks=2)
    _expect_right(new)
    if not closes:
        _expect_right(rank)


def test_creating_a_replica_during_a_step_raises(worlds: Any) -> None:
    for who in range(2):
        assert all("'Rank'" in text for text in worlds(4).run(_create_replica_instead, who))


def _create_replica_instead(who: int) -> str:
    mesh = mesh_of_four()
    options = {"chunks": 2, "group": mesh["stages"], "replicas": mesh["replicas"]}
    rank, x = Rank(_model(), [2, 1], **options), torch.ones(6, 4)
    step = partial(rank.step, x, loss_fn=Tensor.mean, reduction="mean")
    create = partial(Rank, _model(), [2, 1], **options)
    with pytest.raises(ValueError, match="the ranks disagree") as caught:
        create() if mesh["replicas"].get_local_rank() == who else step()
    rank.zero_grad()
    step()
    Rank(_model(), [2, 1], **options).step(x, loss_fn=Tensor.mean, reduction="mean")
    return str(caught.value)
