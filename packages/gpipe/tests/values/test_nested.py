"""Nested tensors on their way through a pipe, and in what errors say."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers import DOUBLE, Call, assert_same, piped, rows, running

pytestmark = [pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")]


def ragged(x: Tensor, layout: torch.layout = torch.jagged) -> Tensor:
    """Of each row, one, two or three copies."""
    return torch.nested.as_nested_tensor([row.expand(1 + i % 3, -1) for i, row in enumerate(x)], layout=layout)


def dense(value: Tensor) -> Tensor:
    return torch.stack([part.sum(0) for part in value.unbind()])


@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("balance", [[2, 3], [3, 2], [1, 1, 1, 2]])
def test_rows_of_several_lengths_train_as_in_the_plain_model(
    balance: list[int], mode: str, schedule: str, inline: bool
):
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3, dtype=DOUBLE), nn.Linear(3, 3, dtype=DOUBLE)
    plain = nn.Sequential(first, Call(ragged), second, nn.Tanh(), Call(dense))
    with closing(piped(plain, balance, chunks=2, checkpoint=mode)) as pipe, running(inline):
        pipe.step(rows(6), rows(6), loss_fn=F.mse_loss, schedule=schedule)
    F.mse_loss(torch.cat([plain(part) for part in rows(6).chunk(2)]), rows(6)).backward()
    assert_same(pipe, plain)
