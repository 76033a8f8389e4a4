"""A pipe is a module like any other: what people do with theirs works with it."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from gpipe import GPipe, inline

from .layers import assert_same, assert_trains_like, each_mode, linears, on_backward, piped, rows


def backward(model: nn.Module) -> None:
    model(rows()).square().sum().backward()


@each_mode
def test_gradient_scaler_and_clipping(mode: str):
    models = [linears(), piped(linears(), [1, 2], chunks=3, checkpoint=mode)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for bad in (False, True, False):
            optimizer.zero_grad()
            loss = model(rows()).square().sum() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 0.5)
            assert bad or norm > 0.5
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


def test_leading_frozen_stages_have_no_backward():
    pipe, calls = piped(linears(), [1, 1, 1], chunks=2), []
    pipe[:2].requires_grad_(False)
    for k in range(3):
        pipe[k].register_forward_hook(lambda _, args, out, k=k: on_backward(out, lambda: calls.append(k)))
    backward(pipe)
    assert set(calls) == {2}


@each_mode
def test_layer_replaced_inside_of_a_layer_is_used(mode: str):
    """Adapters do so."""
    model = nn.Sequential(nn.Sequential(*linears()), *linears())
    pipe = piped(model, [1, 3], chunks=2, checkpoint=mode)
    backward(pipe)
    for each in (model, pipe):
        each[0][1] = nn.Sequential(linears()[0], nn.Tanh(), linears()[2])
    assert_trains_like(pipe, model)


@each_mode
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_lazy_layers(mode: str, chunks: int):
    """A forward that initialises a layer cannot be repeated, and keeps its graph."""
    layers = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    pipe = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    x = rows(6).float()
    pipe(x).square().sum().backward()
    model = nn.Sequential(*copy.deepcopy(list(pipe)))
    model.zero_grad()
    model[1].reset_running_stats()
    for _ in range(2):
        torch.cat([model(chunk) for chunk in x.chunk(chunks)]).square().sum().backward()
        assert_same(pipe, model)
        torch.testing.assert_close(dict(pipe.named_buffers()), dict(model.named_buffers()))
        pipe(x).square().sum().backward()


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
