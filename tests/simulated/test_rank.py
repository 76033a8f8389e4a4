"""Ranks whose stages are on accelerators: what they send goes by way of host memory, without a race."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packages.gpipe.tests.worlds import World
from torch import nn

from gpipe.distributed import Rank

from . import accelerator


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World(2)
    yield opened
    opened.close()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("devices", [(0, 1), (1, None)])
def test_ranks_train_like_the_model(
    world: World, devices: tuple[int | None, int | None], schedule: str, checkpoint: str
):
    world.run(_expect_like_the_model, devices, schedule, checkpoint)


def _expect_like_the_model(devices: tuple[int | None, int | None], schedule: str, checkpoint: str) -> None:
    accelerator.library()
    own = [accelerator.device(each) for each in devices]
    with accelerator.no_races():
        rank = Rank(_network(), [2, 2, 2, 2], chunks=3, checkpoint=checkpoint, device=own)
        plain = _network()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            loss = rank.step(x, loss_fn=lambda output: output.square().mean(), schedule=schedule)
            expected = plain(x).square().mean()
            expected.backward()
        torch.testing.assert_close(loss.cpu(), expected.detach())
        for key, parameter in rank.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), plain.get_parameter(key).grad)
        assert {parameter.device for parameter in rank.parameters()} == set(own)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())])
