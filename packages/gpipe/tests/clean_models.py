"""Models that train in micro-batches as they do without: ``gpipe.check`` must find neither errors nor warnings."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from packages.profiler.tests.hard_layers import SparseBuffer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe import LossSum
from microbatch import Arguments, Replicate, Split

from .layers import Pop, Stash
from .planted_faults import ROWS, WIDTH, Layer, between, contrast, linear, rows


class Clean(NamedTuple):
    """A model, and a mini-batch."""

    model: nn.Module
    sample: Any
    target: Any = None
    loss_fn: Callable[..., Any] | None = None
    reduction: str | None = None


class Noted(nn.Module):
    """A flattened model that takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = F.dropout(self.embed(tokens), 0.1, self.training)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits.mT, labels), "logits": logits}


def one(layer: nn.Module, sample: Any = None) -> Clean:
    return Clean(between(layer), rows() if sample is None else sample)


def of(forward: Callable[..., Any], *modules: nn.Module, **attributes: Any) -> Clean:
    return one(Layer(forward, *modules, **attributes))


def chain(*layers: nn.Module, sample: Any = None) -> Clean:
    return Clean(nn.Sequential(*layers), rows() if sample is None else sample)


def images() -> Tensor:
    return torch.randn(ROWS, 3, 8, 8)


def tokens() -> Tensor:
    return torch.randint(11, (ROWS, 6))


def spread(s: Layer, x: Tensor) -> Tensor:
    """Run experts, each on the rows routed to it."""
    chosen, y = s.m[0](x).argmax(1), torch.zeros_like(x)
    for k, expert in enumerate(s.m[1:]):
        y[chosen == k] = expert(x[chosen == k])
    return y


def remembered(s: Layer, x: Tensor) -> Tensor:
    """Use a cached tensor that does not depend on rows."""
    if s.cache is None or len(s.cache) != x.shape[1]:
        s.cache = torch.arange(x.shape[1], dtype=x.dtype).cos()
    return x * s.cache


def tied() -> Clean:
    embed, head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    head.weight = embed.weight
    return chain(embed, linear(), head, sample=tokens())


def with_loss(loss_fn: Callable[..., Any], target: Tensor | None, reduction: str | None = None) -> Clean:
    return Clean(nn.Sequential(linear(), nn.ReLU(), linear()), rows(), target, loss_fn, reduction)


def counted(y: Tensor, target: Tensor) -> LossSum:
    return LossSum(F.cross_entropy(y, target, reduction="sum"), (target != -100).sum())


def returned(s: Layer, x: Tensor) -> dict[str, Tensor]:
    return {"loss": x.square().mean(), "logits": x}


def summed(x: Tensor) -> LossSum:
    return LossSum(x.square().sum(), x.numel())


def its_loss(sample: Tensor) -> Clean:
    return chain(linear(), Layer(returned), sample=sample)._replace(reduction="mean")


LABELS = torch.arange(ROWS) % WIDTH

OF_ALL_ROWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the root of a mean": lambda y, _: y.square().mean().sqrt(),
    "the largest": lambda y, _: y.square().max(),
    "in-batch negatives": lambda y, _: contrast(y, y.tanh()),
    "a mean over classes": lambda y, t: torch.stack([y[t == k].square().mean() for k in range(WIDTH)]).mean(),
    "with metrics": lambda y, t: (F.cross_entropy(y, t).sqrt(), {"hits": (y.argmax(1) == t).float().mean()}),
}
"""Losses with an unknown reduction."""

CLEAN: dict[str, Callable[[], Clean]] = {
    "a sparse buffer by rows": lambda: chain(SparseBuffer("to_sparse_csr"), nn.Linear(6, 6), sample=torch.rand(8, 6)),
    "perceptron": lambda: one(nn.ReLU()),
    "in place": lambda: one(nn.ReLU(inplace=True)),
    "in place of a view": lambda: of(lambda s, x: (x[:, :3].mul_(2), x)[1]),
    "two inputs": lambda: chain(nn.Bilinear(WIDTH, WIDTH, WIDTH), linear(), sample=Arguments((rows(), rows()), {})),
    "two inputs as arguments": lambda: chain(
        nn.Bilinear(WIDTH, WIDTH, WIDTH), linear(), sample=Arguments((rows(),), {"input2": rows()})
    ),
    "a pair on the way": lambda: chain(
        Layer(lambda s, x: (x, x.sin())), Layer(lambda s, p: s.m[0](p[0]) + p[1], linear()), linear()
    ),
    "a dict on the way": lambda: chain(
        Layer(lambda s, x: {"x": x, "none": None}), Layer(lambda s, d: d["x"] * 2), linear()
    ),
    "the number of rows on the way": lambda: chain(
        Layer(lambda s, x: (x, len(x))), Layer(lambda s, p: p[0].view(p[1], 4, 4).flatten(1)), linear()
    ),
    "dropout": lambda: one(nn.Dropout()),
    "dropout that never ends": lambda: of(lambda s, x: F.dropout(x, 0.3)),
    "noise": lambda: of(lambda s, x: x + torch.randn_like(x)),
    "noise of counts": lambda: of(lambda s, x: x + torch.poisson(x.detach().abs() * 20) if s.training else x),
    "stochastic depth": lambda: of(lambda s, x: x + s.m[0](x) * (torch.rand(len(x), 1) > 0.5), linear()),
    "group norm": lambda: one(nn.GroupNorm(4, WIDTH)),
    "instance norm": lambda: chain(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), sample=images()),
    "batch norm in evaluation": lambda: one(nn.BatchNorm1d(WIDTH).eval()),
    "weight norm": lambda: one(nn.utils.parametrizations.weight_norm(linear())),
    "attention with dropout": lambda: chain(
        nn.Embedding(11, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), sample=tokens()
    ),
    "sequences first": lambda: chain(
        nn.Embedding(11, WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 32),
        Layer(lambda s, x: s.m[0](x)[0], nn.GRU(WIDTH, WIDTH)),
        sample=Split(tokens().T.contiguous(), dim=1),
    ),
    "masks of causes": lambda: chain(
        Layer(lambda s, x: (x.view(-1, 4, 4), torch.full((4, 4), torch.finfo(x.dtype).min).triu(1))),
        Layer(lambda s, p: ((p[0] @ p[0].mT + p[1]).softmax(-1) @ p[0]).flatten(1)),
        linear(),
    ),
    "tokens as rows": lambda: chain(
        nn.Embedding(11, WIDTH), nn.Flatten(0, 1), linear(), nn.Unflatten(0, (-1, 6)), sample=tokens()
    ),
    "embeddings with padding": lambda: chain(nn.Embedding(11, WIDTH, padding_idx=0), linear(), sample=tokens()),
    "sparse gradients": lambda: chain(nn.EmbeddingBag(11, WIDTH, sparse=True), linear(), sample=tokens()),
    "tied weights": tied,
    "frozen": lambda: one(linear().requires_grad_(False)),
    "skips": lambda: chain(linear(), Stash(), linear(), Pop(), linear()),
    "nested": lambda: one(nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()))),
    "experts": lambda: of(spread, nn.Linear(WIDTH, 2), linear(), linear()),
    "a cache": lambda: of(remembered, cache=None),
    "single precision inside": lambda: of(lambda s, x: F.layer_norm(x.float(), (WIDTH,)).to(x.dtype) * x),
    "single precision at the end": lambda: chain(linear(), Layer(lambda s, x: x.float().softmax(1))),
    "half precision": lambda: Clean(between(nn.GELU()).to(torch.bfloat16), rows().to(torch.bfloat16)),
    "parts of a fixed number": lambda: of(
        lambda s, x: torch.cat([s.m[0](part) for part in x.view(4, -1, WIDTH)]), linear()
    ),
    "complex numbers": lambda: of(lambda s, x: torch.fft.irfft(torch.fft.rfft(x) * s.w, WIDTH), w=torch.randn(9)),
    "checkpointed inside": lambda: of(lambda s, x: checkpoint(s.m[0], x, use_reentrant=False), linear()),
    "a reversed gradient": lambda: of(lambda s, x: (x.register_hook(lambda g: -g), x.sin())[1]),
    "prototypes": lambda: of(lambda s, x: torch.cdist(x, s.m[0].weight), linear()),
    "a mask for all rows": lambda: chain(
        linear(), Layer(lambda s, x: (x, torch.arange(WIDTH) > 3)), Layer(lambda s, p: p[0] * p[1]), linear()
    ),
    "an argument for all rows": lambda: chain(
        Layer(lambda s, d: s.m[0](d["x"]) * d["scale"], linear()),
        linear(),
        sample={"x": rows(), "scale": Replicate(torch.rand(WIDTH))},
    ),
    "a flattened model": lambda: Clean(Noted(), tokens()),
    "one with arguments by name": lambda: Clean(Noted(), {"tokens": tokens(), "mask": tokens() > 7}),
    "one with its loss": lambda: Clean(Noted(), {"tokens": tokens(), "labels": tokens()}),
    "cross entropy": lambda: with_loss(F.cross_entropy, LABELS),
    "cross entropy of padded labels": lambda: with_loss(F.cross_entropy, torch.where(LABELS % 5 == 0, -100, LABELS)),
    "a sum and a count": lambda: with_loss(counted, torch.where(LABELS % 5 == 0, -100, LABELS)),
    "a loss for each element": lambda: with_loss(nn.BCEWithLogitsLoss(), torch.rand(ROWS, WIDTH)),
    "a loss in single precision": lambda: with_loss(lambda y, t: F.mse_loss(y.float(), t.float()), rows()),
    "a loss that draws": lambda: with_loss(lambda y, t: F.mse_loss(F.dropout(y), t), rows()),
    "a loss of the output alone": lambda: with_loss(lambda y: y.square().mean(), None),
    "a loss with metrics": lambda: with_loss(lambda y, t: (F.mse_loss(y, t), {"largest": y.max()}), rows()),
    "a sum, a count and metrics": lambda: with_loss(
        lambda y, t: (LossSum((y - t).square().sum(), y.numel()), {"largest": y.max()}), rows()
    ),
    "a mean over rows, as is said": lambda: with_loss(lambda y, t: F.mse_loss(y, t), rows(), "mean"),
    "a sum, as is said": lambda: with_loss(lambda y, t: (y - t).square().sum(), rows(), "sum"),
    "a sum of torch": lambda: with_loss(nn.MSELoss(reduction="sum"), rows()),
    "a model that returns its loss": lambda: its_loss(rows()),
    "a model that returns its loss, of uneven rows": lambda: its_loss(rows()[3:]),
    "a model that returns its loss as a sum and a count": lambda: chain(linear(), Layer(lambda s, x: summed(x))),
    **{f"all rows at once: {name}": partial(with_loss, loss_fn, LABELS) for name, loss_fn in OF_ALL_ROWS.items()},
}
