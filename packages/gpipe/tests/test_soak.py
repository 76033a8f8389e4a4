"""Many steps leave nothing behind: no thread, no tensor, no memory.

Compared by "no more than", because what other tests have left may go in the meantime.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .layers import MODES, counted, trained


def pipe_of(mode: str) -> GPipe:
    """A pipe with something of everything that a run keeps: masks, statistics, hooks."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
    pipe = GPipe(model, [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode, deferred_batch_norm=True)
    pipe[0].weight.register_hook(lambda gradient: gradient * 1.0)
    return pipe


def train(pipe: GPipe, optimizer: torch.optim.Optimizer, x: Tensor, steps: int, schedule: str | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        trained(pipe, x, schedule, counted)
        optimizer.step()


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("steps", [50, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mode", "schedule"), [*((mode, None) for mode in MODES), ("except_last", "1f1b"), ("never", "zero_bubble")]
)
def test_many_steps(mode: str, schedule: str | None, steps: int):
    pipe = pipe_of(mode)
    optimizer, x = torch.optim.SGD(pipe.parameters(), 0.01, momentum=0.9), torch.randn(6, 4)
    train(pipe, optimizer, x, 5, schedule)
    threads, alive = set(threading.enumerate()), tensors()
    train(pipe, optimizer, x, steps, schedule)
    assert set(threading.enumerate()) <= threads
    assert tensors() <= alive
    with torch.no_grad():
        for _ in range(5):
            pipe(x)
    for _ in range(5):
        pipe(x)  # whose backward never comes
    assert set(threading.enumerate()) <= threads
    assert tensors() <= alive


@pytest.mark.parametrize("rounds", [8, pytest.param(20, marks=pytest.mark.long)])
def test_pipes_come_and_go(rounds: int):
    x = torch.randn(6, 4)
    threads, alive = set(threading.enumerate()), 0
    for round_ in range(rounds):
        pipe = pipe_of("except_last")
        pipe(x).sum().backward()
        pipe.close()
        del pipe
        if round_ == 2:
            alive = tensors()
    assert set(threading.enumerate()) <= threads
    assert tensors() <= alive
