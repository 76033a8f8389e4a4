"""Ctrl-C at any line of a step: nothing hangs, nothing is left behind, and the next step is right."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import GPipe

from .layers import MODES, assert_same, counted, linears, rows, running, squares, trained, within

OURS = (str(Path(gpipe.__file__).parents[3]), torch.autograd.grad_mode.__file__)
WAYS = (None, "fill_drain", "1f1b", "zero_bubble", "counted", "evaluate")


def interrupted(work: Callable[[], object], at: int) -> int:
    """Interrupt ``work`` before the line of that number, of all that this thread runs in our packages and where
    torch switches grad mode; 0: never.

    Returns:
        The number of lines that were run.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS) or "/tests/" in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert at  # else this test itself is interrupted
    finally:
        sys.settrace(before)
    return count


class Trial:
    """A pipe with a hook and a gradient that was there before, and its model."""

    def __init__(self, way: str | None, mode: str, inline: bool) -> None:
        self.way, self.inline = way, inline
        self.model = nn.Sequential(*linears(2), nn.Dropout(0.0), *linears(1))
        own = copy.deepcopy(self.model)
        self.pipe = GPipe(own, [1, 2, 1], devices=["cpu"] * 3, chunks=3, checkpoint=mode)
        self.calls: list[Tensor] = []
        own[0].weight.register_hook(self.calls.append)

    def step(self) -> None:
        with running(self.inline):
            if self.way == "evaluate":
                self.pipe.evaluate(rows(), loss_fn=squares)
            elif self.way == "counted":
                trained(self.pipe, rows(), "1f1b", counted)
            else:
                trained(self.pipe, rows(), self.way)

    def expect_all_well(self) -> None:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        self.pipe.zero_grad()
        self.calls.clear()
        self.step()
        if self.way != "evaluate":
            trained(self.model, rows(), None, counted if self.way == "counted" else squares)
            assert len(self.calls) == 1
        assert_same(self.pipe, self.model)
        self.model.zero_grad()


def lines(trial: Trial) -> int:
    """The number of lines of a step, after a first one."""
    trial.step()
    return interrupted(trial.step, 0)


@given(st.sampled_from(WAYS), st.sampled_from(MODES), st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_after_an_interrupt_at_any_line_the_next_step_is_right(
    way: str | None, mode: str, inline: bool, places: list[float]
) -> None:
    def tried() -> None:
        trial = Trial(way, mode, inline)
        total = lines(trial)
        for place in places:
            interrupted(trial.step, 1 + round(place * total))
            trial.expect_all_well()
        trial.pipe.close()

    within(30, tried)
