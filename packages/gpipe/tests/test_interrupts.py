"""Ctrl-C at any place of a step: nothing hangs, nothing is left behind, and the next step is right."""

import contextlib
import copy
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from packages.streams.tests.interleavings.interrupts import Interrupts
from torch import Tensor, nn

import gpipe
import microbatch
import streams
from gpipe import GPipe

from .interleavings.scenarios import expect_nothing_left
from .layers import MODES, Row, assert_same, counted, linears, rows, running, squares, trained, within

OURS = [str(Path(package.__file__).parent) for package in (gpipe, microbatch, streams)]
FILES = (*OURS, contextlib.__file__, torch.autograd.grad_mode.__file__, torch.overrides.__file__)
"""Our packages, and the beginning and end of ``with`` blocks, of changes of grad mode, and of function modes."""
WAYS = (None, "fill_drain", "1f1b", "zero_bubble", "counted", "evaluate")


class Trial:
    """A pipe with a hook and a gradient that was there before, and its model.

    Args:
        way: the name of a schedule, "counted" or "evaluate"; None for a call and its backward.
        mode: the checkpointing mode.
        inline: whether steps run inline.
        blocks: whether the model's own forward runs, with its layers as blocks and a cache that is on.
        tied: whether the first and the last stage share a weight.
    """

    def __init__(self, way: str | None, mode: str, inline: bool, blocks: bool = False, tied: bool = False) -> None:
        self.way, self.inline = way, inline
        layers = [*linears(2), nn.Dropout(0.0), *linears(1)]
        if tied:
            layers[-1].weight = layers[0].weight
        self.model = Row(*layers) if blocks else nn.Sequential(*layers)
        names = {"blocks": [f"layers.{k}" for k in range(4)]} if blocks else {}
        self.model.config = SimpleNamespace(use_cache=True)
        own = copy.deepcopy(self.model)
        self.pipe = GPipe(own, [1, 2, 1], devices=["cpu"] * 3, chunks=3, checkpoint=mode, **names)
        self.config = own.config
        self.parameters = [*map(id, own.parameters())]
        self.calls: list[Tensor] = []
        next(own.parameters()).register_hook(self.calls.append)

    def step(self) -> None:
        with running(self.inline):
            if self.way == "evaluate":
                self.pipe.evaluate(rows(), loss_fn=squares)
            elif self.way == "counted":
                trained(self.pipe, rows(), "1f1b", counted)
            else:
                trained(self.pipe, rows(), self.way)

    def expect_all_well(self) -> None:
        self.expect_nothing_left()
        self.expect_right_step()

    def expect_right_step(self) -> None:
        self.pipe.zero_grad()
        self.calls.clear()
        self.step()
        if self.way != "evaluate":
            trained(self.model, rows(), None, counted if self.way == "counted" else squares)
            assert len(self.calls) == 1
        assert_same(self.pipe, self.model)
        self.model.zero_grad()

    def expect_nothing_left(self) -> None:
        """Expect no traces of an interrupted step, in this thread or in the model."""
        expect_nothing_left(self.pipe)
        assert self.config.use_cache
        assert [*map(id, self.pipe.parameters())] == self.parameters


@given(
    st.sampled_from(WAYS),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
)
def test_step_after_interrupt_is_right(
    way: str | None, mode: str, inline: bool, blocks: bool, tied: bool, places: list[float]
) -> None:
    """The next step is on a new thread, since the interrupted thread could still acquire a lock it holds."""
    trial = Trial(way, mode, inline, blocks, tied)
    trial.step()
    total = Interrupts(FILES)
    total.during(trial.step)
    for place in places:
        interrupts = Interrupts(FILES, 1 + round(place * total.count))
        interrupts.during(trial.step)
        trial.expect_nothing_left()
        within(30, trial.expect_all_well)
        interrupts.error = None
        trial.expect_nothing_left()  # the frames are freed, which ends generators late
    within(30, trial.pipe.close)


def test_every_file_has_places() -> None:
    trial = Trial(None, "always", inline=False, blocks=True)
    trial.step()
    places = Interrupts(FILES)
    places.during(trial.step)
    names = {code.co_filename for code, _ in places.places}
    assert not [file for file in FILES if not any(name.startswith(file) for name in names)]
