"""Models that were built on ``meta`` get their data on accelerators, and pass through host memory layer by layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from profiler import AllocationTracker

from .models import WIDTH, linear, rows
from .placements import devices

SIZE = (WIDTH + 1) * WIDTH * 8  # of a layer, in bytes


def model() -> nn.Sequential:
    """Each layer with a weight and a bias; the last has the weight of the first."""
    layers = [linear() for _ in range(6)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


class OnHost(AllocationTracker):
    """Counts host memory alone."""

    def _on_alloc(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        if storage.device.type == "cpu":
            super()._on_alloc(storage, dtype)


def saved(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


INITS: dict[str, Callable[[dict[str, Tensor], Path], Any]] = {
    "reset": lambda state, folder: "reset",
    "state dict": lambda state, folder: state,
    "file": saved,
}


@pytest.mark.parametrize("init", INITS)
def test_host_memory_never_holds_more_than_a_layer(init: str, tmp_path: Path) -> None:
    plain = model()
    with torch.device("meta"):
        meta = model()
    given = INITS[init](plain.state_dict(), tmp_path)
    with OnHost() as tracker:
        pipe = GPipe(meta, [2, 2, 2], devices=devices("three devices"), chunks=2, init=given)
    assert tracker.peak <= SIZE
    assert [p.device for p in pipe.partitions[1].parameters()] == [pipe.devices[1]] * 4
    assert pipe[5].weight is pipe[0].weight
    assert pipe[5].weight.device == pipe.devices[0]
    if init in ("state dict", "file"):
        found = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)
    x = rows()
    loss = pipe.step(x, loss_fn=lambda output: output.square().mean())
    assert loss.isfinite()
