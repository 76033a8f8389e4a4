"""Lightning trains a module with a pipe in it as it trains one with the plain model."""

import logging
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe import GPipe

from .pipelined import pipelined
from .processes import X, Y, expect_equal_in_two, network, piped

lightning = pytest.importorskip("lightning", reason="lightning is not installed; see nox -s frameworks")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Automatic(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.losses.append(float(F.cross_entropy(self.net(batch[0]), batch[1])))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Manual(Automatic):
    """Manual optimization: the pipe's ``step`` runs forward and backward."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if isinstance(self.net, GPipe):
            loss = self.net.step(batch[0], batch[1], loss_fn=F.cross_entropy)
        else:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss.detach()))


def fitted(module: Automatic, *, ckpt_path: Path | None = None, **options: Any) -> list[float]:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=6)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": 2, "accelerator": "cpu", "enable_checkpointing": False, **quiet}
    trainer = lightning.Trainer(**{**settings, **options})
    with pipelined(module.net, 2) if isinstance(module.net, GPipe) else nullcontext():
        trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return module.losses


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *product([Automatic, Manual], [{}, {"precision": "bf16-mixed"}]),
        *product([Automatic], [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}]),
    ],
)
def test_losses_are_those_of_the_plain_model(kind: type[Automatic], options: dict[str, Any], checkpoint: str) -> None:
    module, expected = kind(piped([2, 3], checkpoint=checkpoint)), kind(network())
    bound = 1e-2 if "precision" in options else 1e-5
    assert fitted(module, **options) == pytest.approx(fitted(expected, **options), rel=bound)
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=bound, atol=bound)


@pytest.mark.parametrize(("before", "after"), [([2, 3], [1, 1, 3]), ([4, 1], None), (None, [2, 3])])
def test_its_checkpoints_are_those_of_the_plain_model(
    before: list[int] | None, after: list[int] | None, tmp_path: Path
) -> None:
    kept = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    finished = Automatic(piped(before))
    fitted(finished, max_epochs=3, callbacks=[kept], enable_checkpointing=True)
    resumed = Automatic(piped(after))
    fitted(resumed, max_epochs=3, ckpt_path=tmp_path / "epoch=1.ckpt")
    torch.testing.assert_close(resumed.state_dict(), finished.state_dict())


class Staying(SingleDeviceStrategy):
    """Moves nothing: a pipe is where it belongs."""

    def model_to_device(self) -> None:
        pass


def test_a_strategy_that_moves_nothing() -> None:
    found = fitted(Automatic(piped([2, 3])), strategy=Staying(torch.device("cpu")), accelerator="cpu")
    assert found == pytest.approx(fitted(Automatic(network())), rel=1e-5)


def parallel() -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    modules = [Automatic(piped([2, 3], checkpoint="always")), Automatic(network())]
    for module in modules:
        fitted(module, strategy="ddp", devices=2, max_epochs=1)
    assert modules[0].losses == pytest.approx(modules[1].losses, rel=1e-5)
    torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict())
    print("equal", flush=True)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_processes() -> None:
    expect_equal_in_two(f"from {__name__} import parallel; parallel()")
