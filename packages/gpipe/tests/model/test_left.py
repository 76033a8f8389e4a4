"""A tensor stored in an attribute by a block is tracked from then on."""

import copy
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.model._left import Left


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return self.kept


def test_read_during_call_of_other_micro_batch_raises() -> None:
    left, block, model = Left(), Keeps(), nn.Module()
    for microbatch in range(2):
        x = torch.ones(())
        look = left.watch("blocks.0", block, microbatch, x, lambda tensor: False)
        output = block(x)
        if microbatch:
            with pytest.raises(RuntimeError, match=r"reads blocks\.0\.kept, where a block has left a tensor"):
                left.expect_not(output, model, 0)
        look(output)
        left.expect_not(output, model, microbatch)
        for other in range(microbatch):
            with pytest.raises(RuntimeError, match=r"reads blocks\.0\.kept"):
                left.expect_not(output, model, other)


class Remembering(nn.Module):
    """Stores a tensor that requires grad in an attribute, and reads it after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.first = x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.first


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
def test_attribute_set_by_forward_is_private_or_raises(schedule: str) -> None:
    torch.manual_seed(0)
    model, x = Remembering(), torch.randn(8, 3)
    plain = copy.deepcopy(model)
    expected = plain(x).square().sum()
    expected.backward()
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=4)) as pipe:
        try:
            loss = pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=schedule)
        except RuntimeError as error:
            assert "micro-batch" in str(error)  # noqa: PT017
            return
    torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
