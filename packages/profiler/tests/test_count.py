"""The bytes that a layer saves, and how the following layers free them."""

import pytest
import torch
from hypothesis import given
from torch import nn

from profiler import AllocationTracker, profile, profile_sizes, profile_times

from .hard_layers import HARD, SIZED_BY_VALUES, first
from .strategies import WIDTH, Call, models, samples

ROW = 4 * WIDTH


def counted(model: nn.Sequential, sample: torch.Tensor, device: str = "cpu"):
    return profile(model, sample, device=device, timeout=1e-6, split_backward=True)


# A layer may free some tensors of a value with several; a detach frees the previous part of the graph.
@given(models(without=("dict", "tuple", "detach")), samples())
def test_saved_bytes_of_layers_add_up(model, sample):
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
    # The output of tanh, and the gradients of its output and input.
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
def test_split_backward_is_timed_in_two_parts(make, splits):
    (layer,) = counted(nn.Sequential(make()), torch.rand(8, WIDTH, requires_grad=True))
    assert (layer.backward_input_seconds is not None) == splits


@pytest.mark.parametrize("name", HARD)
def test_hard_layers_agree_with_fake_tensors(name):
    model, sample = HARD[name]()
    real = profile(model, sample, device="cpu", timeout=1e-6)
    assert real.names == [name for name, _ in model.named_children()]
    assert all(layer.forward_seconds > 0 for layer in real)
    assert (
        len(profile_times(model, sample, 1e-6, "cpu")) == len(profile_sizes(model, sample, 2, 2.0, "cpu")) == len(model)
    )
    if name in SIZED_BY_VALUES:
        with pytest.raises(ValueError, match=r"of layout torch\.sparse_coo depend on its values.*use device='cpu'"):
            profile(model, sample, device="meta")
        return
    fake = profile(model, sample, device="meta")
    for by in ("saved_bytes", "output_bytes", "parameter_bytes", "buffer_bytes", "flops"):
        assert fake.costs(by) == real.costs(by), by


def test_a_backward_goes_through_the_skip_too():
    model, sample = HARD["skip without gradient"]()
    without = profile(model, sample, device="cpu", timeout=1e-6)
    assert [layer.backward_seconds > 0 for layer in without] == [False, False, False]
    found = profile(model, sample.requires_grad_(), device="cpu", timeout=1e-6)
    assert all(layer.backward_seconds > 0 for layer in found)
    rows = 4 * 6 * 4
    # Stashed tensors are alive after the forward; popped ones were created by a different layer.
    assert found["0"].saved_bytes == 2 * rows
    assert found["2"].saved_bytes == rows


# torch warns about the way in which its compiler accesses tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_layers_are_timed_compiled():
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*args):
            runs.append(len(graphs))
            return graph.forward(*args)

        return run

    plain = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model = nn.Sequential(plain[0], torch.compile(plain[1], backend=backend))
    sample = torch.rand(4, 6)
    model(sample)
    profile_times(model, sample, 1e-6, "cpu")
    timed = len(runs)
    assert timed > 1
    assert profile_sizes(model, sample, 1, 2.0, "cpu") == profile_sizes(plain, sample, 1, 2.0, "cpu")
    assert profile_sizes(model, sample, 1, 2.0, "meta") == profile_sizes(plain, sample, 1, 2.0, "meta")
    assert profile(model, sample, device="meta").costs("flops") == profile(plain, sample, device="meta").costs("flops")
    assert len(runs) == timed
    model(sample)
    assert len(runs) == timed + 1
