import pytest
import torch
from torch import nn

from gpipe.balance import balance_by_size, balance_by_time, balance_cost


def test_the_most_expensive_block_is_as_cheap_as_possible():
    assert balance_cost([1, 2, 3, 4, 5, 6], 2) == [4, 2]
    assert balance_cost([6, 5, 4, 3, 2, 1], 2) == [2, 4]
    assert balance_cost([0.5, 0.25, 0.25], 2) == [1, 2]


@pytest.mark.parametrize(("widths", "balance"), [(range(1, 7), [4, 2]), (range(6, 0, -1), [2, 4])])
def test_by_size_counts_what_stays_alive(widths, balance):
    class Expand(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                x = x + torch.rand_like(x, requires_grad=True)
            return x

    model = nn.Sequential(*(Expand(times) for times in widths))
    assert balance_by_size(2, model, torch.rand(10, 10, 10), device="cpu") == balance


def test_by_time_gives_each_partition_a_layer():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    balance = balance_by_time(3, model, torch.rand(2, 4), timeout=0.01, device="cpu")
    assert len(balance) == 3
    assert sum(balance) == 5
    assert min(balance) >= 1
