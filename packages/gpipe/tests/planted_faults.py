"""Faults of layers and losses that train differently in micro-batches: where ``gpipe.check`` has to find each."""

import itertools
import os
import random
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe import LossSum

from .layers import Layer, OnGradient

WIDTH, ROWS = 16, 32


class Fault(NamedTuple):
    """A model, a mini-batch, and the only layer that findings may name; None for the loss and the whole model."""

    model: nn.Module
    sample: Any
    layer: str | None = "2"
    target: Tensor | None = None
    loss_fn: Callable[..., Any] | None = None
    reduction: str | None = None


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def between(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(), nn.GELU(), layer, linear())


def planted(layer: nn.Module) -> Fault:
    return Fault(between(layer), rows())


def function(forward: Callable[[Tensor], Tensor], *parts: nn.Module) -> Fault:
    """A layer that is a function of its input, after ``parts``."""
    return planted(Layer(lambda s, x: forward(nn.Sequential.forward(s.m, x) if len(s.m) else x), *parts))


def backward(change: Callable[[Tensor], Tensor], *, at: str = "input") -> Fault:
    """Return a layer that changes a gradient: its input's, its output's, or the one that reaches its weight."""
    changes = {
        "input": lambda s, x: s.m[0](OnGradient.apply(x, change)),
        "output": lambda s, x: OnGradient.apply(s.m[0](x), change),
        "weight": lambda s, x: F.linear(x, OnGradient.apply(s.m[0].weight, change)),
    }
    return planted(Layer(changes[at], linear()))


def hooked(change: Callable[[Tensor], Tensor]) -> Fault:
    def forward(s: Layer, x: Tensor) -> Tensor:
        y = s.m[0](x)
        y.register_hook(change)
        return y

    return planted(Layer(forward, linear()))


def counted(s: Layer, x: Tensor) -> Tensor:
    s.calls += 1
    return x * (1 + s.calls)


def averaged(s: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.mean.mul_(0.9).add_(0.1 * x.mean(0))
    return x


def cached(s: Layer, x: Tensor) -> Tensor:
    if not s.masks:
        s.masks.append((torch.rand_like(x) > 0.5).detach())
    return x * s.masks[0] if s.training else x


def first_differs(s: Layer, x: Tensor) -> Tensor:
    first, s.first = s.first, False
    return x * 2 if first else x


def turns_itself_off(s: Layer, x: Tensor) -> Tensor:
    y = s.m[0](x)
    s.eval()
    return y


def seeds(s: Layer, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x)


def centred(s: Layer, x: Tensor) -> Tensor:
    return x - x.mean(0) if s.training else x


def grouped(x: Tensor, size: int, *, strided: bool = False) -> Tensor:
    """Rows less the mean of their group."""
    groups = x.view(-1, size, WIDTH) if not strided else x.view(size, -1, WIDTH).transpose(0, 1)
    less = groups - groups.mean(1, keepdim=True)
    return (less if not strided else less.transpose(0, 1)).reshape(len(x), WIDTH)


def mixup(x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return share * x + (1 - share) * x[torch.randperm(len(x))]


STORE: dict[str, Tensor] = {}
LEFT: ContextVar[Tensor] = ContextVar("LEFT")


def kept(what: Callable[[Tensor], Any]) -> Fault:
    """A layer that keeps something of its input for the next one, in a dict that both have."""
    where: dict[str, Any] = {}
    keeps = Layer(lambda s, x: (s.where.update(kept=what(x)), x.tanh())[1], where=where)
    reads = Layer(lambda s, x: x + s.where["kept"], where=where)
    return Fault(nn.Sequential(linear(), keeps, reads, linear()), rows())


def kept_outside(what: Callable[[Tensor], Any], put: Callable[[Any], object], get: Callable[[], Any]) -> Fault:
    """Return the same fault with state that a copy of the model does not include."""
    keeps = Layer(lambda s, x: (put(what(x)), x.tanh())[1])
    return Fault(nn.Sequential(linear(), keeps, Layer(lambda s, x: x + get()), linear()), rows())


def kept_globally(what: Callable[[Tensor], Any]) -> Fault:
    return kept_outside(what, lambda value: STORE.update(kept=value), lambda: STORE["kept"])


def with_loss(loss_fn: Callable[..., Any], reduction: str | None = None, *, labels: bool = False) -> Fault:
    target = torch.arange(ROWS) % WIDTH if labels else rows()
    return Fault(nn.Sequential(linear(), nn.GELU(), linear()), rows(), None, target, loss_fn, reduction)


def mean(loss_fn: Callable[..., Any]) -> Fault:
    """The loss is said to be a mean over rows."""
    return with_loss(loss_fn, "mean")


def padded(loss_fn: Callable[..., Any]) -> Fault:
    fault = with_loss(loss_fn, "mean", labels=True)
    return fault._replace(target=torch.where(torch.arange(ROWS) % 5 == 0, -100, fault.target))


def masked(y: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    return (F.cross_entropy(y, target, reduction="none") * kept).sum() / kept.sum()


def own(loss: Callable[[Tensor], Tensor]) -> Fault:
    """A model that ends with its loss, which is said to be a mean over rows."""
    return Fault(nn.Sequential(linear(), nn.GELU(), Layer(lambda s, x: loss(x))), rows(), None, reduction="mean")


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """Compute a contrastive loss, in which each row depends on the full batch."""
    return F.cross_entropy(F.normalize(one) @ F.normalize(other).T, torch.arange(len(one)))


def warms(s: Layer, y: Tensor, target: Tensor) -> Tensor:
    """A loss that weighs more at each call."""
    s.calls += 1
    return F.mse_loss(y, target) * s.calls


FAULTS: dict[str, dict[str, Callable[[], Fault]]] = {
    "batch norm": {
        "in training": lambda: planted(nn.BatchNorm1d(WIDTH)),
        "without running statistics": lambda: planted(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
        "without them, in evaluation": lambda: planted(nn.BatchNorm1d(WIDTH, track_running_stats=False).eval()),
        "beside dropout": lambda: planted(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(WIDTH))),
    },
    "statistics of the batch": {
        "softmax over rows": lambda: planted(nn.Softmax(0)),
        "by the largest value": lambda: function(lambda x: x / x.abs().max()),
        "own batch norm after dropout": lambda: function(lambda x: (x - x.mean(0)) / x.std(0), nn.Dropout()),
    },
    "rows that meet": {
        "attention across rows": lambda: function(lambda x: F.softmax(x @ x.T / 4, -1) @ x),
        "attention across rows with dropout": lambda: planted(
            Layer(lambda s, x: s.m[0](x, x, x)[0], nn.MultiheadAttention(WIDTH, 2, dropout=0.2))
        ),
        "convolution over rows": lambda: function(lambda x: F.avg_pool1d(x.T, 3, 1, 1).T),
        "sums up to a row": lambda: function(lambda x: x.cumsum(0)),
    },
    "order of rows": {
        "shifted": lambda: function(lambda x: x.roll(1, 0)),
        "shuffled": lambda: function(lambda x: x[torch.randperm(len(x))]),
    },
    "mixtures of rows": {"mixup in training alone": lambda: planted(Layer(lambda s, x: mixup(x) if s.training else x))},
    "noise by the batch": {
        "by its deviation": lambda: function(lambda x: x + torch.randn_like(x) * x.std()),
        "by its mean, in training": lambda: planted(
            Layer(lambda s, x: x * (1 + torch.rand_like(x) * x.mean(0)) if s.training else x)
        ),
    },
    "groups of rows": {
        "of two": lambda: function(lambda x: grouped(x, 2)),
        "of four, far apart": lambda: function(lambda x: grouped(x, 4, strided=True)),
        "of four after dropout": lambda: function(lambda x: grouped(x, 4), nn.Dropout()),
        # As critics of images append it.
        "deviation": lambda: function(lambda x: x + x.view(4, -1, WIDTH).std(0).mean(1).repeat(4)[:, None]),
    },
    "number of rows": {
        "divided by it": lambda: function(lambda x: x / len(x)),
        "divided by it after dropout": lambda: function(lambda x: x / len(x), nn.Dropout()),
        "another way for large batches": lambda: function(lambda x: x.tanh() if len(x) > 16 else x.sin()),
    },
    "place of a row": {
        "counted": lambda: function(lambda x: x + torch.arange(len(x))[:, None]),
        "the first one is special": lambda: function(lambda x: torch.cat([2 * x[:1], x[1:]])),
    },
    "rows that are lost": {
        "summed up": lambda: function(lambda x: x.sum(0)),
        "twice": lambda: function(lambda x: torch.cat([x, x])),
        "chosen by the batch": lambda: function(lambda x: x[x.sum(1) > x.sum(1).median()]),
    },
    "a fixed number of rows": {
        "view of all": lambda: function(lambda x: x.view(ROWS, WIDTH)),
        "view of half": lambda: Fault(
            nn.Sequential(linear(), Layer(lambda s, x: x.view(16, -1)), nn.Linear(2 * WIDTH, WIDTH)), rows(), "1"
        ),
        "a bias for each": lambda: planted(Layer(lambda s, x: x + s.b, b=torch.randn(ROWS, 1))),
        "after dropout": lambda: function(lambda x: x.view(ROWS, WIDTH), nn.Dropout()),
    },
    "gradients": {
        "by the number of rows": lambda: backward(lambda g: g * len(g)),
        "clipped over rows": lambda: backward(lambda g: g / g.norm(), at="output"),
        "centred by a hook": lambda: hooked(lambda g: g - g.mean(0)),
        "of a fixed number of rows": lambda: backward(lambda g: g.view(ROWS, WIDTH)),
        "of a weight, by their norm": lambda: backward(lambda g: g / (1 + g.norm()), at="weight"),
    },
    "state": {
        "a counter": lambda: planted(Layer(counted, calls=0)),
        "a counter in a buffer": lambda: planted(Layer(counted, calls=torch.zeros(()))),
        "spectral norm": lambda: planted(nn.utils.parametrizations.spectral_norm(linear())),
        "a mask for ever": lambda: planted(Layer(cached, masks=[])),
        "another first call": lambda: planted(Layer(first_differs, first=True)),
        "own generator": lambda: planted(Layer(lambda s, x: x * torch.rand(WIDTH, generator=s.g), g=torch.Generator())),
    },
    "a running mean": {
        "that nothing uses": lambda: planted(Layer(averaged, mean=torch.zeros(WIDTH))),
        "beside dropout": lambda: planted(nn.Sequential(nn.Dropout(), Layer(averaged, mean=torch.zeros(WIDTH)))),
        "that the output uses": lambda: planted(Layer(lambda s, x: averaged(s, x) - s.mean, mean=torch.zeros(WIDTH))),
    },
    "Python and clocks": {
        "its random numbers": lambda: function(lambda x: x * random.random()),
        "NumPy's random numbers": lambda: function(lambda x: x * np.random.rand()),
        "the clock": lambda: function(lambda x: x * (time.perf_counter() % 1)),
        "the system's random numbers": lambda: function(lambda x: x + os.urandom(1)[0] + os.urandom(1)[0] / 256),
        "a counter outside": lambda: (lambda numbers: function(lambda x: x + next(numbers)))(itertools.count()),
    },
    "global generators": {
        "seeded for dropout": lambda: planted(Layer(seeds)),
        "seeded and not used": lambda: function(lambda x: (torch.manual_seed(1), x.tanh())[1]),
    },
    "training and evaluation differ": {
        "centred": lambda: planted(Layer(centred)),
        "centred after dropout": lambda: planted(nn.Sequential(nn.Dropout(), Layer(centred))),
        "divided by rows": lambda: planted(Layer(lambda s, x: x / len(x) if s.training else x)),
        "turns itself off": lambda: planted(Layer(turns_itself_off, nn.Dropout())),
    },
    "state of other layers": {
        "their input": lambda: kept(lambda x: x.detach()),
        "a statistic of it": lambda: kept(lambda x: x.detach().mean()),
        "their input, globally": lambda: kept_globally(lambda x: x.detach()),
        "a statistic of it, globally": lambda: kept_globally(lambda x: x.detach().mean()),
        "a statistic of it, in a context variable": lambda: kept_outside(
            lambda x: x.detach().mean(), LEFT.set, LEFT.get
        ),
    },
    "losses that are no mean over rows": {
        "padding, by hand": lambda: padded(masked),
        "padding, in a sum of means": lambda: padded(lambda y, t: F.cross_entropy(y, t) + y.square().mean()),
        "a sum": lambda: mean(lambda y, t: F.mse_loss(y, t, reduction="sum")),
        "a mean that is said to be a sum": lambda: with_loss(lambda y, t: F.mse_loss(y, t), "sum"),
        "the root of a mean": lambda: mean(lambda y, t: F.mse_loss(y, t).sqrt()),
        "by a fixed number of rows": lambda: mean(lambda y, t: (y - t).square().sum() / ROWS),
        "the largest": lambda: mean(lambda y, t: (y - t).square().max()),
        "a wrong count": lambda: with_loss(lambda y, t: LossSum(F.mse_loss(y, t), len(y))),
    },
    "losses in which rows meet": {
        "in-batch negatives": lambda: mean(contrast),
        "decorrelated columns": lambda: mean(lambda y, t: F.mse_loss(y, t) + torch.cov(y.T).square().mean()),
        "pairs": lambda: mean(lambda y, t: (y - y.view(-1, 2, WIDTH).flip(1).view_as(y)).square().mean()),
    },
    "losses with a state": {
        "of calls": lambda: with_loss(Layer(warms, calls=0)),
        "of Python's generator": lambda: with_loss(lambda y, t: F.mse_loss(y, t) * random.random()),
        "of the clock": lambda: with_loss(lambda y, t: F.mse_loss(y, t) * (time.perf_counter() % 1)),
    },
    "losses of the model": {
        "a sum": lambda: own(lambda y: y.square().sum()),
        "in-batch negatives": lambda: own(lambda y: contrast(y, y.tanh())),
        "the root of a mean": lambda: own(lambda y: y.square().mean().sqrt()),
    },
    "nothing to train": {
        "detached": lambda: Fault(nn.Sequential(linear(), Layer(lambda s, x: x.detach())), rows(), None),
        "whole numbers": lambda: Fault(nn.Sequential(linear(), Layer(lambda s, x: x.argmax(1))), rows(), None),
        "frozen": lambda: Fault(nn.Sequential(linear(), linear()).requires_grad_(False), rows(), None),
    },
}
