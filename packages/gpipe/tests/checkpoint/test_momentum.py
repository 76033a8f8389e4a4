"""State that a forward moves, such as the weights of a momentum encoder, moves once for each micro-batch."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ..layers import DOUBLE, assert_same, piped, rows

pytestmark = pytest.mark.usefixtures("one_thread")


class Momentum(nn.Module):
    """A linear layer beside its average, which every forward in training moves towards it."""

    def __init__(self, parameter: bool) -> None:
        super().__init__()
        self.online = nn.Linear(3, 3, dtype=DOUBLE)
        average = torch.zeros(3, 3, dtype=DOUBLE)
        if parameter:
            self.average = nn.Parameter(average, requires_grad=False)
        else:
            self.register_buffer("average", average)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.online.weight, 0.1)
            target = x @ self.average
        y: Tensor = self.online(x) + target
        return y


@given(
    st.booleans(),
    st.integers(0, 1),
    st.integers(1, 3),
    st.sampled_from(["never", "except_last", "always"]),
    st.sampled_from([None, "fill_drain", "1f1b", "zero_bubble"]),
)
def test_what_a_forward_moves_moves_once_for_each_micro_batch(
    parameter: bool, at: int, chunks: int, mode: str, schedule: str | None
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(3, 3, dtype=DOUBLE), nn.Linear(3, 3, dtype=DOUBLE)]
    layers[at] = Momentum(parameter)
    plain = nn.Sequential(*layers)
    with closing(piped(plain, [1, 1], chunks=chunks, checkpoint=mode)) as pipe:
        for part in rows().chunk(chunks):
            plain(part).square().sum().backward()
        if schedule is None:
            pipe(rows()).square().sum().backward()
        else:
            pipe.step(rows(), loss_fn=lambda y, _: y.square().sum(), schedule=schedule, reduction="sum")
        assert_same(pipe, plain)
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
