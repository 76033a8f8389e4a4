"""The threads of a pipe: reused between runs, stopped with the pipe, and private to it."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packages.streams.tests.fakes import in_child
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe.engine._workers import Workers
from streams import CPUStream

from ..layers import DOUBLE, Call, assert_trains_like, linears, on_backward, piped, rows, within


@pytest.fixture
def born() -> Callable[[], set[threading.Thread]]:
    """Return a function that returns the threads started since the test began."""
    gc.collect()
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


def spy() -> tuple[nn.Module, list[threading.Thread]]:
    """A layer, and the threads that call it, forwards and backwards."""
    threads: list[threading.Thread] = []

    def note() -> None:
        threads.append(threading.current_thread())

    def layer(x: Tensor) -> Tensor:
        note()
        return on_backward(x, note)

    return Call(layer), threads


def spied(stages: int, **options: Any) -> tuple[GPipe, list[list[threading.Thread]]]:
    layers, threads = zip(*(spy() for _ in range(stages)), strict=True)
    pipe = GPipe(nn.Sequential(*layers), [1] * stages, devices=["cpu"] * stages, **options)
    return pipe, list(threads)


def test_each_stage_has_one_thread() -> None:
    pipe, threads = spied(3, chunks=2)
    for _ in range(3):
        pipe(rows(grad=True)).sum().backward()
    assert [len(set(each)) for each in threads] == [1, 1, 1]
    assert len({each[0] for each in threads} | {threading.current_thread()}) == 4


def test_workers_keep_their_denormal_mode() -> None:
    tiny = torch.full((1, 1), 1e-310, dtype=DOUBLE)
    pipe = GPipe(nn.Sequential(Call(lambda x: x * 0.5), nn.Identity()), [1, 1], devices=["cpu"] * 2)

    def is_kept() -> bool:
        # As an integer, since this thread itself may take the number for 0.
        return bool(pipe(tiny).view(torch.int64) != 0)

    assert is_kept()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor handles denormal numbers in one way")
    try:
        assert is_kept()
        pipe.close()
        assert not is_kept()
    finally:
        torch.set_flush_denormal(False)
        pipe.close()


def test_close_ends_threads_until_next_run(born: Callable[[], set[threading.Thread]]) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    pipe.close()  # before any run: nothing to do
    for _ in range(3):
        assert_trains_like(pipe, linears())
        assert len(born()) == 2
        pipe.close()
        assert not born()
        pipe.close()


def test_workers_end_if_the_second_stop_is_interrupted(born: Callable[[], set[threading.Thread]]) -> None:
    interrupts = iter([False, False, True])  # the first stop is the worker's

    def stop() -> None:
        if next(interrupts):
            raise KeyboardInterrupt

    def fail() -> None:
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        Workers([torch.device("cpu")]).run([(CPUStream, fail)], stop)
    assert not born()


def test_run_may_outlive_its_pipe(born: Callable[[], set[threading.Thread]]) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    weight = pipe[0].weight
    output = pipe(rows())
    del pipe
    gc.collect()
    within(20, output.sum().backward)
    assert weight.grad is not None
    del output
    gc.collect()
    for thread in born():
        thread.join(60)
    assert not born()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("balance", [[2, 1], [1, 2]], ids=["the last worker", "a worker that others wait for"])
def test_pipe_may_be_collected_on_its_worker(balance: list[int], born: Callable[[], set[threading.Thread]]) -> None:
    def train() -> None:
        collecting = Call(lambda x: on_backward(x, gc.collect))
        model = nn.Sequential(*linears(1), collecting, *linears(1))
        pipe = GPipe(model, balance, devices=["cpu"] * 2, chunks=2)
        pipe.__dict__["me"] = pipe
        output = pipe(rows())
        del pipe, model, collecting
        output.sum().backward()

    within(20, train)
    gc.collect()
    for thread in born():
        thread.join(60)
    assert not born()


def test_inline_everything_happens_on_this_thread(born: Callable[[], set[threading.Thread]]) -> None:
    pipe, threads = spied(2, chunks=2, checkpoint="always")
    with inline():
        output = pipe(rows(grad=True))
    output.sum().backward()
    assert {*threads[0], *threads[1]} == {threading.current_thread()}
    assert not born()


def test_backward_runs_like_its_forward() -> None:
    pipe, (threads,) = spied(1, checkpoint="never")
    with inline():
        here = pipe(rows(grad=True))
    there = pipe(rows(grad=True))
    here.sum().backward()
    with inline():
        there.sum().backward()
    assert [each is threading.current_thread() for each in threads] == [True, False, True, False]


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("threads", "stages", "share"), [(1, 2, 1), (4, 2, 2), (5, 2, 2), (4, 1, 4), (2, 3, 1)])
def test_workers_divide_the_threads_of_the_caller(threads: int, stages: int, share: int) -> None:
    torch.set_num_threads(threads)
    counts: list[int] = []
    layers = [Call(lambda x: counts.append(torch.get_num_threads()) or x) for _ in range(stages)]
    GPipe(nn.Sequential(*layers), [1] * stages, devices=["cpu"] * stages)(rows())
    assert counts == [share] * stages
    assert torch.get_num_threads() == threads


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch runs no backward in a child after one with a GPU's threads"
)
def test_forked_child_starts_its_own_threads() -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    pipe(rows()).sum().backward()

    def train_again() -> bool:
        pipe.zero_grad()
        within(20, lambda: pipe(rows()).sum().backward())
        pipe.close()
        return pipe[0].weight.grad is not None

    assert in_child(train_again) == "True"
    assert_trains_like(pipe, linears())
