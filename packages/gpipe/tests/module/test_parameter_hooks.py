"""Parameter hooks fire once per run, with the complete gradient, like in the plain model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import LossSum

from ..layers import Call, each_mode, linears, piped, rows


@each_mode
def test_optimizer_in_the_backward(mode: str):
    """Steps as soon as a gradient is whole, and lets it go."""
    models = [linears(), piped(linears(), [1, 2], chunks=3, checkpoint=mode)]
    for model in models:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(rows()).square().sum().backward()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize(("counted", "times"), [(False, 3), (True, 1)])
def test_hooks_of_free_tensor_fire_per_micro_batch(counted: bool, times: int) -> None:
    """A tensor in a layer's closure is not a parameter, so it is unknown until its gradient arrives."""
    free = torch.ones(3, dtype=rows(6).dtype, requires_grad=True)
    calls: list[Tensor] = []
    free.register_hook(calls.append)
    pipe = piped(nn.Sequential(*linears(1), Call(lambda x: x * free)), [1, 1], chunks=3)

    def loss_fn(output: Tensor, _: None) -> Any:
        return LossSum(output.square().sum(), output.numel()) if counted else output.square().mean()

    pipe.step(rows(6), loss_fn=loss_fn, schedule="1f1b", reduction=None if counted else "mean")
    assert len(calls) == times
    assert free.grad is not None
    torch.testing.assert_close(torch.stack(calls).sum(0), free.grad)


def test_hooks_fire_per_use_of_parameter() -> None:
    """They fire for the gradient through the pipe, and for the caller's own use of the parameter."""
    pipe = piped(linears(), [1, 2], chunks=2)
    weight = pipe[0].weight
    calls: list[Tensor] = []
    weight.register_hook(calls.append)
    (pipe(rows()).square().sum() + weight.square().sum()).backward()
    assert len(calls) == 2
    torch.testing.assert_close(sum(calls), weight.grad)
