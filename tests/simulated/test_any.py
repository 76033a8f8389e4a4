"""Any placement and valid schedule, with workers delayed anywhere: no races, and the plain model's results."""

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packages.gpipe.tests.schedules import CHOICES, some_schedule
from torch import nn

from gpipe import GPipe
from gpipe.engine._workers import placement
from gpipe.transport._transport import Link

from .accelerator import device, no_races
from .models import MODES, Pop, Stash, expected, linear, rows, running, trained


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Delay sends and receives of threads: not at all, by yielding to other threads, or for up to 1 ms.

    How long depends on the seed, the link and the micro-batch alone. The pauses are sleeps on purpose: threads reach
    their operations in unusual orders, and nothing waits for them. Events could set the order instead, but would
    deadlock under some schedules.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "get"):
            patch.setattr(Link, name, _after_a_pause(getattr(Link, name), f"{seed} {name}"))
        yield


def _after_a_pause(method: Callable[..., Any], seed: str) -> Callable[..., Any]:
    def paused(link: Link[Any], microbatch: int, *payload: Any) -> Any:
        choice = random.Random(f"{seed} {link.name} {microbatch}")
        if choice.random() < 0.5:
            time.sleep(choice.choice([0.0, choice.random() * 0.001]))
        return method(link, microbatch, *payload)

    return paused


def model(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Stash(), *(nn.Sequential(linear(), nn.Tanh()) for _ in range(stages)), Pop())


@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(
    places=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=4),
    microbatches=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    choices=CHOICES,
    streams=st.sampled_from(["default", "own"]),
    inline=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_schedule(
    places: list[int | None],
    microbatches: int,
    mode: str,
    choices: tuple[int, ...],
    streams: str,
    inline: bool,
    seed: int,
):
    plain, devices, x = model(len(places)), [device(k) for k in places], rows()[: 2 * microbatches]
    stop = {"never": 0, "except_last": microbatches - 1, "always": microbatches}[mode]
    workers = (0,) * len(places) if inline else placement(devices)
    schedule = some_schedule(choices, microbatches, workers, stop)
    balance = [1 + (j == 0) + (j == len(places) - 1) for j in range(len(places))]
    pipe = GPipe(copy.deepcopy(plain), balance, devices=devices, chunks=microbatches, checkpoint=mode)
    with no_races(), running(inline), delayed(seed):
        found = trained(pipe, x.to(devices[0]), schedule, streams)
    pipe.close()
    torch.testing.assert_close(found, expected(plain, x))
