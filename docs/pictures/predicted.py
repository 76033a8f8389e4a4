"""Draw docs/pictures/predicted.svg: a step of the digits example, predicted from a profile and recorded.

python docs/pictures/predicted.py
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from gpipe.balance import balance_cost
from gpipe.schedule import one_forward_one_backward
from gpipe.simulate import simulate, stage_costs
from profiler import profile

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "examples"))
CHUNKS, STAGES, ROUNDS = 8, 2, 40


def main() -> None:
    from digits import load, network

    torch.manual_seed(0)
    torch.set_num_threads(STAGES)
    (images, labels), _ = load()
    images, labels = images[:256], labels[:256]
    model = network(16)
    with one_thread():
        layers = profile(model, images, device="cpu", chunks=CHUNKS, timeout=5)
    balance = balance_cost(layers.seconds, STAGES)
    predicted = simulate(one_forward_one_backward(CHUNKS, STAGES), stage_costs(layers, balance))

    loops = unlinked(copy.deepcopy(model), balance, images)
    pipe = GPipe(model, balance, devices=["cpu"] * STAGES, chunks=CHUNKS, checkpoint="never")
    rounds = [(recorded(pipe, images, labels), slowdown(loops)) for _ in range(ROUNDS + 3)][3:]  # after warming up
    memory = recorded(pipe, images, labels, memory=True)
    pipe.close()

    ratios = [timeline.makespan / predicted.makespan for timeline, _ in rounds]
    measured = sorted((timeline for timeline, _ in rounds), key=lambda timeline: timeline.makespan)[ROUNDS // 2]
    print(f"balance: {balance}")
    print(f"step, recorded / predicted: {quartiles(ratios)}")
    print(f"the same without links, both stages at once / one by one: {quartiles([slow for _, slow in rounds])}")
    print(f"the first divided by the second: {quartiles([r / s for r, (_, s) in zip(ratios, rounds, strict=True)])}")
    print(f"bubble, predicted {predicted.bubble:.2f}, recorded {quartiles([t.bubble for t, _ in rounds])}")
    print(f"peak bytes of each stage, predicted {predicted.peak_bytes}, recorded {memory.peak_bytes}")
    predicted.save(HERE / "predicted.svg", title="predicted", compare_with={"measured": measured})


@contextmanager
def one_thread() -> Iterator[None]:
    """An operation takes one thread inside, which is what a stage gets."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded(pipe: GPipe, images: Tensor, labels: Tensor, memory: bool = False) -> gpipe.Timeline:
    # Gradients are added to those of the step before: else they would be born here, and counted as kept.
    with gpipe.record(memory=memory) as timeline:
        pipe.step(images, labels, loss_fn=F.cross_entropy)
    return timeline


def unlinked(model: nn.Sequential, balance: Sequence[int], images: Tensor) -> list[Callable[[], None]]:
    """The work of each stage, with nobody to wait for."""
    loops, x = [], images[: len(images) // CHUNKS]
    for start, size in zip((0, balance[0]), balance, strict=True):
        stage = model[start : start + size]
        loops.append(lambda stage=stage, x=x: [stage(x).sum().backward() for _ in range(CHUNKS)])
        x = stage(x).detach().requires_grad_()
    return loops


def slowdown(loops: Sequence[Callable[[], None]]) -> float:
    """How much longer the loops take when they run at the same time: what the machine does to two threads."""
    with one_thread():
        alone = [timed([loop]) for loop in loops]
        return timed(loops) / max(alone)


def timed(loops: Sequence[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=loop) for loop in loops]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def quartiles(figures: Sequence[float]) -> str:
    low, middle, high = quantiles(figures, n=4)
    return f"{middle:.2f} ({low:.2f} – {high:.2f})"


if __name__ == "__main__":
    main()
