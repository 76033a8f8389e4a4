"""A profile leaves everything of the caller unchanged, whatever it profiles and however it ends."""

import copy
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

from profiler import AllocationTracker, profile, profile_sizes, profile_times

from .strategies import Call, OnGradient, fewer, models, samples


class Fails(nn.Module):
    def __init__(self, error, backward):
        super().__init__()
        self.error, self.backward = error, backward

    def forward(self, x):
        torch.rand(1)
        return OnGradient.apply(x, self.fail) if self.backward else self.fail()

    def fail(self, *_):
        raise self.error

    def __deepcopy__(self, memo):
        return Fails(self.error, self.backward)


WAYS = {
    "times": lambda model, sample: profile_times(model, sample, 1e-6, "cpu"),
    "sizes": lambda model, sample: profile_sizes(model, sample, 1, 2.0, "cpu"),
    "fake sizes": lambda model, sample: profile_sizes(model, sample, 1, 2.0, "meta"),
    "profile": lambda model, sample: profile(model, sample, device="cpu", timeout=1e-6),
    "fake profile": lambda model, sample: profile(model, sample, device="meta"),
}
ways = st.sampled_from(sorted(WAYS)).map(WAYS.__getitem__)


def state(model, sample):
    """Return everything that a profile must leave unchanged."""
    tensors = [*model.named_parameters(), *model.named_buffers(), *enumerate(tree_leaves(sample))]
    return {
        "identities": [(name, id(x), x.data_ptr(), x._version, x.requires_grad, x.grad_fn) for name, x in tensors],
        "values": [x.detach().clone() for _, x in tensors],
        "grads": [None if x.grad is None else x.grad.clone() for _, x in tensors if x.is_leaf],
        "flags": [(child.training, *map(id, child._modules.values())) for child in model.modules()],
        "hooks": [
            list(vars(child)[name].items())
            for child in model.modules()
            for name in vars(child)
            if "hook" in name and hasattr(vars(child)[name], "items")
        ],
        "generator": torch.get_rng_state(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
    }


def assert_same(before, after):
    for key, old in before.items():
        for x, y in zip(tree_leaves(old), tree_leaves(after[key]), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, key


@fewer
@given(models(), samples(), ways, st.booleans(), st.booleans())
def test_nothing_changes(model, sample, way, training, grad):
    model.train(training)
    calls = []
    for layer in model:
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.register_hook(calls.append)
    before = state(model, sample)
    with torch.set_grad_enabled(grad):
        way(model, sample)
    assert_same(before, state(model, sample))
    assert calls == []


@fewer
@given(models(), samples(), ways, st.booleans(), st.data())
def test_nothing_changes_when_a_layer_raises(model, sample, way, backward, data):
    error = data.draw(st.sampled_from([ValueError("no"), KeyboardInterrupt(), SystemExit(3)]))
    model = nn.Sequential(*model, nn.Linear(6, 6), Fails(error, backward))
    before = state(model, sample)
    if way in (WAYS["sizes"], WAYS["fake sizes"]) and backward:
        way(model, sample)  # sizes need no backward
    else:
        with pytest.raises(type(error)) as caught:
            way(model, sample)
        assert caught.value is error
    assert_same(before, state(model, sample))


@fewer
@given(models(), samples(), ways, st.booleans())
def test_nothing_is_left_in_memory(model, sample, way, autocast):
    births = AllocationTracker()
    with births, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        way(model, sample)
        gc.collect(0)
        assert births.alive() == 0


def test_autocast_weights_are_counted_without_filling_cache():
    model, sample = nn.Sequential(nn.Linear(6, 6)), torch.rand(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = profile(model, sample, device="cpu", timeout=1e-6)
        # The output, and the casts of the input, the weight and the bias.
        assert found["0"].saved_bytes == 2 * (24 + 24 + 36 + 6)
        again = copy.deepcopy(model)(sample)
    assert again.dtype is torch.bfloat16


@pytest.mark.parametrize("look", [lambda x: x * x.sum().item(), lambda x: x[x > 0.5]], ids=["item", "mask"])
def test_layer_that_reads_values_raises_on_meta(look):
    with pytest.raises(RuntimeError, match="use device='cpu'"):
        profile(nn.Sequential(Call(look)), torch.rand(4, 6), device="meta")


def test_the_error_names_the_layer_and_its_input():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match=r"layer '2' \(Linear\) on input \(4, 5\) float32 on cpu"):
        profile(model, torch.rand(4, 6), device="cpu")
