"""Inline, the same programs run on the caller's thread, in one order, with the same results."""

from __future__ import annotations

import threading

from torch import Tensor, nn

from gpipe import GPipe, inline

from ..layers import Call, OnBackward, numbered, rows


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
