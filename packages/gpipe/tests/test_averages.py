"""``torch.optim.swa_utils`` of a pipe: averages of weights, and the running statistics that go with them."""

import copy
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from gpipe import GPipe, inline

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def averaged(model: nn.Module, steps: int, ema: bool) -> AveragedModel:
    """Trained in evaluation mode, where batch norm does not depend on micro-batches."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if ema else get_swa_multi_avg_fn())
    optimizer = torch.optim.SGD(model.eval().parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        average.update_parameters(model)
    update_bn([[X[:6], Y[:6]], [X[6:], Y[6:]]], average.train())
    return average


@given(
    cut=st.integers(1, 4),
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    steps=st.integers(1, 3),
    ema=st.booleans(),
    threads=st.booleans(),
)
@settings(max_examples=8)
def test_averages_are_those_of_the_plain_model(
    cut: int, chunks: int, checkpoint: str, steps: int, ema: bool, threads: bool
) -> None:
    pipe = GPipe(
        network(), [cut, 5 - cut], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=True
    )
    expected = averaged(network(), steps, ema)
    with nullcontext() if threads else inline():
        found = averaged(pipe, steps, ema)
        assert isinstance(found.module, GPipe)
        torch.testing.assert_close(copy.deepcopy(found.eval())(X), expected.eval()(X))
    for name, value in expected.module.state_dict().items():
        torch.testing.assert_close(found.module.state_dict()[name], value, rtol=1e-9, atol=1e-12)
