"""Which stream each action of a run is on, and what waits for it: on stand-ins for streams, with stages on the CPU.

The stand-ins know what waits for what, and a layer queues work on the one that is current for its thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from packages.streams.tests.accelerator import FakeAccelerator, accelerator
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.engine import _run
from streams import current_stream, use_stream

from ..layers import Call, OnBackward, each_mode, each_way, rows

DEVICE = torch.device("xpu", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAccelerator]:
    """Every stage is on the CPU, and computes on the caller's current stream of ``DEVICE``."""
    with accelerator("xpu") as fake:
        monkeypatch.setattr(_run, "current_stream", lambda device: current_stream(DEVICE))
        yield fake


class Works(nn.Module):
    """The identity; it queues work on the current stream, in the forward and in the backward, and notes which it is."""

    def __init__(self, fake: FakeAccelerator, seen: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.fake = fake
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.work()
        return OnBackward.apply(x * self.weight, self.work)

    def work(self) -> None:
        stream = self.fake.current_stream(DEVICE)
        stream.work()
        self.seen.append((stream, self.fake.index))


def piped(fake: FakeAccelerator, mode: str, *, last: nn.Module | None = None) -> tuple[GPipe, list[Any]]:
    seen: list[Any] = []
    layers = [Works(fake, seen) for _ in range(3)] + ([] if last is None else [last])
    balance = [1, 1, len(layers) - 2]
    pipe = GPipe(nn.Sequential(*layers), balance, devices=["cpu"] * 3, chunks=3, checkpoint=mode)
    pipe._pipeline.on_accelerator = True  # else nobody asks for streams
    return pipe, seen


@each_mode
@each_way
def test_everything_is_on_the_stream_of_the_forward(fake: FakeAccelerator, mode: str, way: Any) -> None:
    """Also a recomputation, whose backward the caller asks for on another stream, with another device current."""
    pipe, seen = piped(fake, mode)
    forth, back = fake.stream(0, 1), fake.stream(0, 2)
    with way(), use_stream(forth):
        output = pipe(rows())
    fake.set_device_index(2)
    with use_stream(back):
        fake.set_device_index(1)
        output.sum().backward()
    assert len(seen) == 3 * 3 * 2 + 3 * {"never": 0, "except_last": 2, "always": 3}[mode]
    assert set(seen) == {(forth, 0)}
    assert back.comes_after(forth)


@each_mode
@each_way
def test_the_caller_waits_also_for_a_backward_that_fails(fake: FakeAccelerator, mode: str, way: Any) -> None:
    seconds = chain([1], repeat(0))  # the second backward raises
    pipe, _ = piped(fake, mode, last=Call(lambda x: OnBackward.apply(x, lambda: 1 // next(seconds))))
    forth, back = fake.stream(0, 1), fake.stream(0, 2)
    with way(), use_stream(forth):
        output = pipe(rows())
    with use_stream(back), pytest.raises(ArithmeticError):
        output.sum().backward()
    assert back.comes_after(forth)
