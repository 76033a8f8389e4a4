"""A tensor that a block has left in an attribute is known from the moment at which it is set."""

import pytest
import torch
from torch import Tensor, nn

from gpipe.model._left import Left


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return self.kept


def test_a_read_during_the_call_for_another_micro_batch_is_refused() -> None:
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
