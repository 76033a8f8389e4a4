"""The repeatability of balances by time, and the time to compute sizes without a device.

Two profilers measure the same model in turns: ours (median of rounds) and, if installed, torchgpipe's (sum of rounds).
The same exact partitioner splits by both, so that only the measurements differ. A long profile, taken half before and
half after, is the reference for every balance. `spread` is how far the worst balance's bottleneck lies above the best
one's, `loss` how far the median lies above the reference's optimum, and `noise` the median over layers of the
relative standard deviation of a layer's share of the sum.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from blockpartition import partition
from gpipe.balance._balance import intra_op_threads
from profiler import profile, profile_sizes

from .report import Report, Table

Costs = Sequence[float]
Model = tuple[nn.Sequential, torch.Tensor]
Profiler = Callable[[nn.Sequential, torch.Tensor, float], Costs]


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Balances by time; sizes of a model without a device."""
    torch.manual_seed(0)
    repeats, timeout = (2, 0.05) if options.quick else (options.rounds or 10, 1.0)
    with intra_op_threads(1):
        balances = _balances(repeats, timeout)
    yield Report([balances])
    if options.quick:
        return
    yield Report([_large()])


def _balances(repeats: int, timeout: float) -> Table:
    caption = f"{repeats} profiles of {timeout:g} s by each, in turns; the reference has {10 * timeout:g} s"
    headings = ("model", "profiler", "spread", "loss", "noise", "different balances")
    table = Table("profiler.md", "balances", caption, headings, left=2)
    for make, partitions in ((convolutions, 3), (transformer, 4), (small, 4)):
        compare(table, make, partitions, repeats, timeout)
    return table


def convolutions() -> Model:
    """Return a network whose images shrink while channels grow; torchgpipe's profiler fails on in-place layers."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise([3, 16, 32, 48, 64, 96]):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if outside in (32, 64) else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)), torch.rand(8, 3, 32, 32)


def transformer() -> Model:
    """A cheap embedding, equal blocks, and an expensive head."""
    blocks = [nn.TransformerEncoderLayer(96, 4, 384, batch_first=True) for _ in range(10)]
    return nn.Sequential(nn.Embedding(2000, 96), *blocks, nn.Linear(96, 2000)), torch.randint(2000, (4, 64))


def small() -> Model:
    """Layers of some microseconds, where the clock and Python weigh most."""
    widths = [64, 128, 32, 256, 64, 192, 64, 128, 96]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers), torch.rand(32, 64, requires_grad=True)


def ours(model: nn.Sequential, sample: torch.Tensor, timeout: float) -> Costs:
    return profile(model, sample, device="cpu", timeout=timeout).seconds


@functools.cache
def profilers() -> dict[str, Profiler]:
    found: dict[str, Profiler] = {"gpipe-profiler": ours}
    try:
        from torchgpipe.balance.profile import profile_times as theirs
    except ImportError:
        return found
    found["torchgpipe 0.0.7"] = lambda model, sample, timeout: theirs(model, sample, timeout, torch.device("cpu"))
    return found


def bottleneck(costs: Costs, sizes: Sequence[int]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise([0, *accumulate(sizes)]))


def shares(costs: Costs) -> list[float]:
    return [cost / sum(costs) for cost in costs]


def noise(runs: list[Costs]) -> float:
    columns = zip(*map(shares, runs), strict=True)
    return statistics.median(statistics.pstdev(column) / statistics.mean(column) for column in columns)


def measured(model: nn.Sequential, sample: torch.Tensor, repeats: int, timeout: float) -> dict[str, list[Costs]]:
    runs: dict[str, list[Costs]] = {name: [] for name in profilers()}
    for _ in range(repeats):
        for name, measure in profilers().items():
            runs[name].append(measure(model, sample, timeout))
    return runs


def compare(table: Table, make: Callable[[], Model], partitions: int, repeats: int, timeout: float) -> None:
    model, sample = make()
    before = ours(model, sample, 5 * timeout)
    runs = measured(model, sample, repeats, timeout)
    after = ours(model, sample, 5 * timeout)
    truth = [statistics.mean(pair) for pair in zip(before, after, strict=True)]
    best = float(partition(truth, partitions).bottleneck)
    drift = bottleneck(after, partition(before, partitions).sizes) / float(partition(after, partitions).bottleneck)
    name = f"{make.__name__}, {len(model)} layers in {partitions}"
    table.notes.append(f"{name}: the first half of the reference loses {drift - 1:.1%} by the second")
    for profiler, costs in runs.items():
        balances = [partition(cost, partitions).sizes for cost in costs]
        found = [bottleneck(truth, balance) for balance in balances]
        spread, loss = max(found) / min(found) - 1, statistics.median(found) / best - 1
        table.add(name, profiler, f"{spread:.1%}", f"{loss:.1%}", f"{noise(costs):.1%}", len(set(balances)))


def _large() -> Table:
    """Measure a Sequential with 70 billion parameters on the meta device."""
    with torch.device("meta"):
        block = [nn.TransformerEncoderLayer(8192, 64, 28672, batch_first=True) for _ in range(95)]
        model = nn.Sequential(nn.Embedding(32000, 8192), *block, nn.Linear(8192, 32000))
    parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.zeros(8, 4096, dtype=torch.long)
    began = time.perf_counter()
    sizes = profile_sizes(model, tokens, 8, 4.0, None)
    spent = time.perf_counter() - began
    caption = "Sizing a model on `meta`: 8 × 4096 tokens in 8 micro-batches, with Adam"
    table = Table("profiler.md", "large", caption, ("layers", "parameters, 10⁹", "TiB", "seconds to count"), left=0)
    table.add(len(model), f"{parameters / 1e9:.1f}", f"{sum(sizes) / 2**40:.2f}", f"{spent:.1f}")
    return table
