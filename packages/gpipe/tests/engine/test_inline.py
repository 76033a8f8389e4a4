"""Inline, the same programs run on the caller's thread, in one order, with the same results."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe import GPipe, inline
from gpipe.engine._settings import settings

from ..layers import Call, OnBackward, assert_same, assert_trains_like, linears, numbered, piped, rows

each_mode = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


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


class TestSwitch:
    def test_it_is_off_unless_somebody_turns_it_on(self) -> None:
        assert not settings().inline
        with inline():
            assert settings().inline
            with inline():
                assert settings().inline
            assert settings().inline
        assert not settings().inline

    def test_an_error_turns_it_off(self) -> None:
        with contextlib.suppress(ValueError), inline():
            raise ValueError
        assert not settings().inline

    def test_it_is_on_for_this_thread_only(self) -> None:
        seen: list[bool] = []
        with inline():
            thread = threading.Thread(target=lambda: seen.append(settings().inline))
            thread.start()
            thread.join(300)
        assert seen == [False]


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
    def test_the_order_is_the_same_every_time(self, stages: int, chunks: int, checkpoint: str) -> None:
        orders = []
        for _ in range(2):
            pipe, events = recorded(stages, chunks, checkpoint)
            train(pipe, chunks)
            orders.append(events)
        assert orders[0] == orders[1]

    @given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["always", "except_last", "never"]))
    def test_every_cell_comes_after_what_it_needs(self, stages: int, chunks: int, checkpoint: str) -> None:
        pipe, events = recorded(stages, chunks, checkpoint)
        train(pipe, chunks)
        cells = [(i, j) for i in range(chunks) for j in range(stages)]
        first = {event: place for place, event in reversed(list(enumerate(events)))}
        assert all(first["forward", i, j - 1] < first["forward", i, j] for i, j in cells if j)
        assert all(first["backward", i, j] < first["backward", i, j - 1] for i, j in cells if j)
        assert sorted(event[1:] for event in events if event[0] == "backward") == cells

    @each_mode
    def test_results_are_the_same(self, checkpoint: str) -> None:
        model = linears()
        for mode in (inline, contextlib.nullcontext):
            pipe = piped(model, [1, 1, 1], chunks=4, checkpoint=checkpoint)
            with mode():
                assert_trains_like(pipe, model)

    def test_forward_inline_and_threaded_may_take_turns(self) -> None:
        pipe, model = piped(linears(), [1, 2], chunks=2), linears()
        for _ in range(2):
            with inline():
                output = pipe(rows())
            threaded = pipe(rows())
            (output.square().sum() + threaded.square().sum()).backward()
            (2 * model(rows()).square().sum()).backward()
        assert_same(pipe, model)

    def test_a_profiler_of_one_thread_sees_the_layers(self) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        with inline(), torch.profiler.profile() as profile:
            pipe(rows()).sum().backward()
        assert sum(event.count for event in profile.key_averages() if event.key == "aten::linear") >= 6

    def test_dispatch_modes_of_the_caller_see_the_layers(self) -> None:
        model, pipe = linears(), piped(linears(), [1, 2], chunks=2, checkpoint="never")
        totals = []
        for module in (model, pipe):
            with inline(), FlopCounterMode(display=False) as counter:
                module(rows()).sum().backward()
            totals.append(counter.get_total_flops())
        assert totals[0] == totals[1] > 0

    def test_a_failure_is_raised_as_it_is_and_the_pipe_trains_on(self) -> None:
        pipe = piped(nn.Sequential(*linears(2), Call(torch.clone)), [1, 1, 1], chunks=2)

        def fail(x: Tensor) -> Tensor:
            raise KeyError("no more")

        pipe[2].function = fail
        with inline(), pytest.raises(KeyError, match="no more") as caught:
            pipe(rows())
        assert "partition 2" in caught.value.__notes__[0]
        pipe[2].function = torch.clone
        with inline():
            assert_trains_like(pipe, nn.Sequential(*linears(2), nn.Identity()))
        assert_trains_like(pipe, nn.Sequential(*linears(2), nn.Identity()))
