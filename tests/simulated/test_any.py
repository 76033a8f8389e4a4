"""Any placement, any schedule that is valid, and workers held up anywhere: no races, and as the plain model."""

from __future__ import annotations

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packages.gpipe.tests.schedules import CHOICES, some_schedule
from torch import nn

from gpipe import GPipe
from gpipe.engine._workers import placement

from .accelerator import device, no_races
from .delays import delayed
from .models import MODES, Pop, Stash, expected, linear, rows, running, trained


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
