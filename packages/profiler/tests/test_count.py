"""What a layer leaves alive, and what becomes of it behind the next."""

import pytest
import torch
from hypothesis import given
from torch import nn

from profiler import AllocationTracker, profile, profile_sizes

from .hard_layers import first
from .strategies import WIDTH, Call, models, samples

ROW = 4 * WIDTH


def counted(model: nn.Sequential, sample: torch.Tensor, device: str = "cpu"):
    return profile(model, sample, device=device, timeout=1e-6, split_backward=True)


# Of a value with several tensors it is not known which of them a layer frees; a detach frees the graph before it.
@given(models(without=("dict", "tuple", "detach")), samples())
def test_together_layers_keep_what_a_run_of_all_leaves_alive(model, sample):
    tracker, entered = AllocationTracker(), sample.detach().requires_grad_(sample.requires_grad) * 1
    with tracker:
        output = model.train()(entered)
    kept = tracker.alive()
    found = loose = 0  # `loose` are bytes that no layer has needed so far
    for layer in counted(model, sample):
        freed = min(layer.freed_bytes, loose)
        found += layer.saved_bytes - freed
        loose = min(layer.passing_bytes, layer.saved_bytes + loose - freed)
    assert found == kept
    del output


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_first_micro_batch_has_the_most_rows(device):
    assert profile_sizes(nn.Sequential(nn.ReLU()), torch.rand(8, WIDTH), 3, 0, device) == [3 * ROW]


def test_a_parameter_counts_so_many_times():
    linear = nn.Sequential(nn.Linear(WIDTH, 10))
    assert profile_sizes(linear, torch.rand(8, WIDTH), 1, 2.5, "cpu") == [8 * 4 * 10 + int(2.5 * 4 * 10 * (WIDTH + 1))]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_of_a_backward_counted_by_hand(device):
    weight = 4 * (WIDTH * WIDTH + WIDTH)
    model = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    first, second = counted(model, torch.rand(8, WIDTH, requires_grad=True), device)
    # What tanh gave, the gradients of what it gave and of what it got.
    assert first.peak_bytes == 3 * 8 * ROW
    assert second.peak_bytes == 2 * 8 * ROW + weight


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(super().forward(x).tanh())


@pytest.mark.parametrize(
    ("make", "splits"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), True),
        (nn.Tanh, True),
        (lambda: nn.ReLU(inplace=True), True),
        (lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), True),
        (lambda: nn.Sequential(nn.LSTM(WIDTH, WIDTH), Call(first)), False),  # one kernel gives all gradients
        (lambda: Twice(WIDTH, WIDTH), False),  # gradients of a weight add up
    ],
    ids=["linear", "tanh", "in place", "frozen", "lstm", "twice"],
)
def test_a_backward_has_two_parts_where_an_engine_may_do_one_first(make, splits):
    (layer,) = counted(nn.Sequential(make()), torch.rand(8, WIDTH, requires_grad=True))
    assert (layer.backward_input_seconds is not None) == splits
