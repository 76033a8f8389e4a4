"""Plans for devices of their own memory: links to each other and to the host are measured."""

import gc
import math
from contextlib import closing
from itertools import permutations

import pytest
import torch
from torch import nn

import gpipe
from gpipe._plan._links import measure_host_bandwidth, measure_links

from .accelerator import DEVICES, device, library, limited


def test_links_are_measured():
    devices = [device(k) for k in range(DEVICES)]
    links = measure_links(devices)
    assert all(links[k][k](10**9) == 0 for k in range(DEVICES))
    assert all(0 < links[i][j].bandwidth < math.inf for i, j in permutations(range(DEVICES), 2))
    assert all(links[i][j] == links[j][i] for i, j in permutations(range(DEVICES), 2))
    assert 0 < measure_host_bandwidth(devices) < math.inf


def test_a_plan_is_built_and_trains():
    """In the order of the devices that the plan has chosen."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    x, devices = torch.randn(16, 32), [device(k) for k in range(DEVICES)]
    found = gpipe.plan(model, x, devices, loss_fn=torch.sum, reduction="sum", chunks=4, calibrate=False)
    assert "; links send " in found.notes[0]
    assert {*found.devices} == {*map(str, devices)}
    loss = model(x).sum()
    pipe = found.build(model)
    torch.testing.assert_close(pipe.step(x, loss_fn=torch.sum, reduction="sum", **found.step_arguments).cpu(), loss)
    assert [each.type for each in pipe.devices] == ["simulated"] * DEVICES


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_planned_bytes_suffice(schedule: str, count: int):
    """Also for a boundary whose tensor no layer saves: a cell keeps its outputs until its backward."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))))
    x, devices = torch.randn(32 * 8, 64), [device(k) for k in range(count)]
    given = {"loss_fn": squares, "reduction": "sum", "chunks": 8, "checkpoint": "never", "schedule": schedule}
    found = gpipe.plan(model, x, devices, **given, optimizer="sgd", calibrate=False)
    gc.collect()
    others = [library().used(k) for k in range(count)]

    def step() -> None:
        pipe.zero_grad(set_to_none=False)
        with gpipe.inline():  # how far a stage is ahead must not depend on threads
            pipe.step(x, loss_fn=squares, reduction="sum", **found.step_arguments)

    with closing(found.build(model)) as pipe:
        step()
        for name, planned in zip(found.devices, found.predicted.bytes, strict=True):
            k = devices.index(torch.device(name))
            gc.collect()
            with limited(k, round(1.1 * planned.total) + others[k] - library().used(k)):
                step()
