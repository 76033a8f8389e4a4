"""Plans for devices that are not there, of models without data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe import Plan, plan

pytestmark = pytest.mark.usefixtures("one_thread")


def large(layers: int = 8, width: int = 2**13) -> nn.Sequential:
    """Layers of 256 MiB each, without data."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def test_a_model_that_fits_nowhere_here_is_planned():
    x = torch.zeros(16, 2**13)
    found = plan(large(), x, "4x3GB", loss_fn=lambda output, _: output.sum())
    assert found.devices == ("fake 3GB",) * 4
    assert found.memory == (3 * 10**9,) * 4
    assert found.balance == [2, 2, 2, 2]
    for need in found.predicted.bytes:
        assert need.parameters == 2 * 2**28
        assert need.optimizer == 2 * need.parameters
        assert need.gradients in (2**28, 2**29)  # half of them, while the first micro-batch turns around
        assert need.total <= 3 * 10**9
    assert "an estimate: nothing ran" in found.notes[0]
    assert found.predicted.seconds.low < found.predicted.seconds.mid < found.predicted.seconds.high
    assert Plan.from_json(found.to_json()) == found
