"""What a run has found out about a stage is there for the next one, also after a failure."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe.engine._stage import Stage

from ..layers import linears, rows

WAYS = {"threads": nullcontext, "inline": inline}


class ChangesLate(nn.Module):
    """Works in place on what it gets, except for the first micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if float(x.detach().flatten()[0]) > 0 else x * 2


def stages_of(pipe: GPipe) -> list[Stage]:
    return list(pipe._pipeline.stages)


def trains(pipe: GPipe, x: Tensor) -> None:
    pipe(x).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_failed_run_has_found_is_kept(way: str):
    """The first run is refused, and the next one works, as the error promises."""
    pipe = GPipe(nn.Sequential(*linears(1, 2), ChangesLate()), [1, 1], devices=["cpu"] * 2, chunks=2)
    pipe.checkpoint = "never"
    with torch.no_grad():
        pipe[0].weight.copy_(torch.eye(2))
        pipe[0].bias.zero_()
    x = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    with WAYS[way]():
        assert not stages_of(pipe)[1].changes_late
        with pytest.raises(RuntimeError, match="on this micro-batch but not on the first"):
            trains(pipe, x)
        assert stages_of(pipe)[1].changes_late
        assert torch.equal(pipe(x), 2 * x)


@pytest.mark.parametrize("way", WAYS)
@given(order=st.permutations(range(3)))
def test_a_backward_takes_nothing_away_that_later_runs_have_found(way: str, order: list[int]):
    """Property: whatever the order of the backwards of several runs, all training modes stay known."""
    pipe = GPipe(nn.Sequential(nn.Dropout(), *linears(1, 2), nn.Dropout()), [1, 2], devices=["cpu"] * 2, chunks=2)
    pipe.checkpoint = "always"
    with WAYS[way]():
        outputs = []
        for k in range(3):
            pipe[2].train(k != 1)
            outputs.append(pipe(rows(4, 2)))
        for k in order:
            pipe[2].train(k != 1)
            outputs[k].sum().backward()
        assert [len(stage.recomputation.compared) for stage in stages_of(pipe)] == [1, 2]
