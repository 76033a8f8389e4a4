"""Inline, the same programs run on the caller's thread, in one order, with the same results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe import GPipe, inline

from ..layers import Call, OnBackward, linears, numbered, piped, rows


def recorded(stages: int, chunks: int, checkpoint: str) -> tuple[GPipe, list[tuple[str, int, int]]]:
    """A pipe, and what it does: forward or backward, micro-batch, stage."""
    events: list[tuple[str, int, int]] = []

    def layer(stage: int) -> Callable[[Tensor], Any]:
        def forward(x: Tensor) -> Tensor:
            i = int(x.detach()[0, 0])
            events.append(("forward", i, stage))
            return OnBackward.apply(x, lambda: events.append(("backward", i, stage)))

        return forward

    model = nn.Sequential(*(Call(layer(j)) for j in range(stages)))
    return GPipe(model, [1] * stages, devices=["cpu"] * stages, chunks=chunks, checkpoint=checkpoint), events


def train(pipe: GPipe, chunks: int) -> None:
    with inline():
        output = pipe(numbered(chunks).requires_grad_())
    output.sum().backward()


class TestRun:
    def test_everything_happens_on_this_thread(self) -> None:
        threads: set[threading.Thread] = set()

        def note() -> None:
            threads.add(threading.current_thread())

        def layer(x: Tensor) -> Tensor:
            note()
            return OnBackward.apply(x, note)

        model = nn.Sequential(Call(layer), Call(layer))
        pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
        before = set(threading.enumerate())
        with inline():
            output = pipe(rows(grad=True))
        output.sum().backward()
        assert threads == {threading.current_thread()}
        assert set(threading.enumerate()) == before

    def test_a_backward_follows_its_forward_and_not_the_moment(self) -> None:
        threads: list[threading.Thread] = []
        layer = Call(lambda x: OnBackward.apply(x, lambda: threads.append(threading.current_thread())))
        pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
        with inline():
            here = pipe(rows(grad=True))
        there = pipe(rows(grad=True))
        here.sum().backward()
        with inline():
            there.sum().backward()
        assert threads[0] is threading.current_thread()
        assert threads[1] is not threading.current_thread()

    @given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["always", "except_last", "never"]))
    def test_every_cell_comes_after_what_it_needs(self, stages: int, chunks: int, checkpoint: str) -> None:
        pipe, events = recorded(stages, chunks, checkpoint)
        train(pipe, chunks)
        cells = [(i, j) for i in range(chunks) for j in range(stages)]
        first = {event: place for place, event in reversed(list(enumerate(events)))}
        assert all(first["forward", i, j - 1] < first["forward", i, j] for i, j in cells if j)
        assert all(first["backward", i, j] < first["backward", i, j - 1] for i, j in cells if j)
        assert sorted(event[1:] for event in events if event[0] == "backward") == cells

    def test_dispatch_modes_of_the_caller_see_the_layers(self) -> None:
        model, pipe = linears(), piped(linears(), [1, 2], chunks=2, checkpoint="never")
        totals = []
        for module in (model, pipe):
            with inline(), FlopCounterMode(display=False) as counter:
                module(rows()).sum().backward()
            totals.append(counter.get_total_flops())
        assert totals[0] == totals[1] > 0
