"""Samples with rules around their parts are cut as a step cuts them, and layers see none of the rules."""

from typing import Any

import pytest
import torch
from torch import nn

from microbatch import Replicate, Split
from profiler import profile


class First(nn.Module):
    """Needs its mask and flag whole, and rows of x on the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        assert value["flag"] is False
        assert value["mask"].shape == (5,)
        assert value["x"].shape[0] == 3
        return self.linear(value["x"].T)


def sample() -> dict[str, Any]:
    return {"x": Split(torch.ones(3, 8), dim=1), "mask": Replicate(torch.ones(5)), "flag": Replicate(False)}


def model() -> nn.Sequential:
    return nn.Sequential(First(), nn.Tanh())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{}, {"chunks": 4}, {"rows": [2, 4]}])
def test_profiles(device: str, options: dict[str, Any]) -> None:
    found = profile(model(), sample(), device=device, timeout=0.01, **options)
    rows = 4 if "rows" in options else 8 // options.get("chunks", 1)
    assert [layer.output_bytes for layer in found.layers] == [rows * 3 * 4] * 2
