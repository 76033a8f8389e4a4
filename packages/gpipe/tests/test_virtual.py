"""Virtual devices on one GPU: stages with separate workers, streams and links, with each stage in turn slow."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .layers import linears, on_backward, rows, running, trained, within
from .virtual import virtual_devices

pytestmark = [pytest.mark.cuda]

HOWS = (None, "fill_drain", "1f1b", "interleaved", "zero_bubble")
TICKS = 50_000_000


class Slow(nn.Module):
    """The identity, which first keeps its stream busy for tens of milliseconds, in the backward too."""

    def forward(self, x: Tensor) -> Tensor:
        self.work(x)
        return on_backward(x * 1, lambda: self.work(x))

    def work(self, x: Tensor) -> None:
        if x.is_cuda:
            torch.cuda._sleep(TICKS)


def gradients_of(module: nn.Module, x: Tensor, how: str | None) -> list[Tensor]:
    """Gradients of the input and of all parameters, on the CPU."""
    leaf = x.detach().clone().requires_grad_()
    trained(module, leaf, how)
    return [tensor.grad.cpu() for tensor in (leaf, *module.parameters())]


@pytest.mark.parametrize("slow", range(3))
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("how", HOWS)
def test_nobody_reads_before_it_is_written(slow: int, mode: str, inline: bool, how: str | None):
    plain = linears(3)
    wanted = gradients_of(plain, rows(), None)
    layers = [nn.Sequential(layer, Slow()) if j == slow else layer for j, layer in enumerate(copy.deepcopy(linears(3)))]
    with virtual_devices(), running(inline):
        pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=["cuda:0"] * 3, chunks=3, checkpoint=mode)
        found = within(60, lambda: gradients_of(pipe, rows().to("cuda:0"), how))
    torch.testing.assert_close(found, wanted)
