"""Plans for devices of their own memory: links to each other and to the host are measured."""

import math
from itertools import permutations

import torch
from torch import nn

import gpipe
from gpipe._plan._links import measured_host_bandwidth, measured_links

from .accelerator import DEVICES, device


def test_links_are_measured():
    devices = [device(k) for k in range(DEVICES)]
    links = measured_links(devices)
    assert all(links[k][k](10**9) == 0 for k in range(DEVICES))
    assert all(0 < links[i][j].bandwidth < math.inf for i, j in permutations(range(DEVICES), 2))
    assert all(links[i][j] == links[j][i] for i, j in permutations(range(DEVICES), 2))
    assert 0 < measured_host_bandwidth(devices) < math.inf


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
