"""Ctrl-C at any place of a step: nothing hangs, nothing is left behind, and the next step is right."""

import copy
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from packages.streams.tests.interleavings.interrupts import Interrupts
from torch import Tensor, nn

import gpipe
from gpipe import GPipe

from .layers import MODES, assert_same, counted, linears, rows, running, squares, trained, within

FILES = (str(Path(gpipe.__file__).parents[3]), torch.autograd.grad_mode.__file__)
"""Our packages, and where torch switches grad mode."""
WAYS = (None, "fill_drain", "1f1b", "zero_bubble", "counted", "evaluate")


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


@given(st.sampled_from(WAYS), st.sampled_from(MODES), st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_step_after_interrupt_is_right(way: str | None, mode: str, inline: bool, places: list[float]) -> None:
    """The next step is on a new thread, since the interrupted thread could still acquire a lock it holds."""
    trial = Trial(way, mode, inline)
    trial.step()
    total = Interrupts(FILES)
    total.during(trial.step)
    for place in places:
        Interrupts(FILES, 1 + round(place * total.count)).during(trial.step)
        within(30, trial.expect_all_well)
    within(30, trial.pipe.close)
