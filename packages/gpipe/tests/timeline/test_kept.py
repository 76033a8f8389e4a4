"""What layers keep together, beside what is alive after they ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe.simulate import stage_costs
from profiler import AllocationTracker, profile


@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 3, 2]], ids=str)
def test_stages_are_predicted_to_keep_what_is_alive_after_their_forwards(balance: list[int]):
    model = nn.Sequential(*[make() for _ in range(3) for make in (lambda: nn.Linear(8, 8), nn.ReLU)])
    x = torch.rand(4, 8, requires_grad=True)
    found = stage_costs(profile(model, x, device="cpu", timeout=1e-6), balance)
    first = 0
    for size, cost in zip(balance, found, strict=True):
        entered = x.detach().requires_grad_() * 1
        with AllocationTracker() as tracker:
            output = model[first : first + size](entered)
        del entered  # a later layer may hold it, which did not make it
        assert cost.activation_bytes == tracker.alive()
        first += size
    del output
