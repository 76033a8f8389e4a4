"""A pipe is a module like any other: what people do with theirs works with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.prune import l1_unstructured

from gpipe import GPipe

from .layers import DOUBLE, OnBackward, assert_same, assert_trains_like, linears, piped, rows

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("never", "except_last", "always")
each_mode = pytest.mark.parametrize("mode", MODES)


def both(mode: str = "except_last", chunks: int = 3) -> list[Any]:
    """A model, and a pipe of a copy of it."""
    return [linears(), piped(linears(), [1, 2], chunks=chunks, checkpoint=mode)]


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(rows()).square().sum() * factor).backward()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.05, fused=True),
    "rmsprop, foreach": lambda p: torch.optim.RMSprop(p, 0.05, foreach=True),
}


@each_mode
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_groups(name: str, mode: str):
    models = both(mode)
    for model in models:
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        optimizer = OPTIMIZERS[name]([{"params": biases, "lr": 0.01, "weight_decay": 0.0}, {"params": weights}])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


@each_mode
def test_gradient_scaler_and_clipping(mode: str):
    models = both(mode)
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


REPARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3, dtype=DOUBLE)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3, dtype=DOUBLE)),
    "of one's own": lambda: own_parametrization(nn.Linear(3, 3, dtype=DOUBLE)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3, dtype=DOUBLE)),
    "old spectral norm": lambda: old_spectral_norm(nn.Linear(3, 3, dtype=DOUBLE)),
    "pruned": lambda: l1_unstructured(nn.Linear(3, 3, dtype=DOUBLE), "weight", 0.4),
}


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def own_parametrization(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@each_mode
@pytest.mark.parametrize("name", REPARAMETRIZED)
def test_reparametrized_layers(name: str, mode: str):
    """Against the micro-batch loop, because a spectral norm iterates at every forward."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), REPARAMETRIZED[name](), nn.Tanh())

    model = make()
    pipe = GPipe(make(), [1, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint=mode)
    for _ in range(2):
        pipe(rows()).square().sum().backward()
        torch.cat([model(part) for part in rows().chunk(3)]).square().sum().backward()
        assert_same(pipe, model)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(model.named_buffers()))


@each_mode
def test_forward_and_backward_hooks_of_layers_and_partitions(mode: str):
    pipe, calls = piped(linears(), [1, 2], chunks=2, checkpoint=mode), []
    for name, module in (("layer", pipe[2]), ("partition", pipe.partitions[1])):
        module.register_forward_pre_hook(lambda *args, name=name: calls.append((name, "pre")))
        module.register_forward_hook(lambda *args, name=name: calls.append((name, "forward")))
        module.register_full_backward_pre_hook(lambda *args, name=name: calls.append((name, "backward pre")))
        module.register_full_backward_hook(lambda *args, name=name: calls.append((name, "backward")))
    assert_trains_like(pipe, linears(), rows(grad=True))
    again = {"never": 0, "except_last": 1, "always": 2}[mode]
    for name in ("layer", "partition"):
        assert calls.count((name, "pre")) == calls.count((name, "forward")) == 2 + again
        assert calls.count((name, "backward pre")) == calls.count((name, "backward")) == 2


def test_hooks_of_the_pipe_itself_are_called_once():
    pipe, calls = piped(linears(), [1, 2], chunks=3), []
    pipe.register_forward_hook(lambda *args: calls.append("forward"))
    pipe.register_full_backward_hook(lambda _, ins, outs: calls.append(("backward", ins[0].shape, outs[0].shape)))
    pipe(rows(grad=True)).sum().backward()
    assert calls == ["forward", ("backward", (6, 3), (6, 3))]


@each_mode
@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_frozen_stages(frozen: list[int], mode: str):
    model = linears()
    pipe = piped(model, [1, 1, 1], chunks=2, checkpoint=mode)
    for each in (model, pipe):
        for k in frozen:
            each[k].requires_grad_(False)
    for grad in (True, False):
        if grad or len(frozen) < 3:
            assert_trains_like(pipe, model, rows(grad=grad))
        else:
            assert not pipe(rows()).requires_grad


def test_frozen_stages_before_the_first_trained_one_have_no_backward():
    pipe, calls = piped(linears(), [1, 1, 1], chunks=2), []
    pipe[:2].requires_grad_(False)
    for k in range(3):
        pipe[k].register_forward_hook(lambda _, args, out, k=k: OnBackward.apply(out, lambda: calls.append(k)))
    backward(pipe)
    assert set(calls) == {2}


@each_mode
def test_layer_replaced_inside_of_a_layer_is_used(mode: str):
    """As adapters do."""
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
