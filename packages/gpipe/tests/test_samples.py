"""The input of a step is also accepted as the sample of balances, plans, checks and models."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from gpipe.balance import balance_by_flops, balance_by_size, balance_by_time
from microbatch import Arguments, Replicate

from .layers import rows


class First(nn.Linear):
    def forward(self, value: dict[str, Any]) -> Tensor:  # type: ignore[override]
        assert value["flag"] is False
        assert value["mask"] is None or len(value["mask"]) == 3
        return super().forward(value["x"]) * value["scale"]


class Blocks(nn.Module):
    """A model with its own forward, whose arguments have names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, scale: float = 1.0, flag: bool = True, mask: Tensor | None = None) -> Tensor:
        assert flag is False
        assert mask is None or len(mask) == 3
        for layer in self.layers:
            x = layer(x)
        return x * scale


def sequential() -> nn.Sequential:
    return nn.Sequential(First(3, 3), nn.Tanh(), nn.Linear(3, 3))


def sample(mask: Any = None, whole: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
    return {"x": rows(6).float(), "scale": whole(2.0), "flag": whole(False), "mask": mask}


SAMPLES = {"constants": sample, "rules": lambda: sample(mask=Replicate(torch.ones(3)), whole=Replicate)}

each_sample = pytest.mark.parametrize("name", list(SAMPLES))
each_model = pytest.mark.parametrize(
    ("make", "name"), [(sequential, "constants"), (sequential, "rules"), (Blocks, "rules")]
)


@each_model
@pytest.mark.parametrize("balance", [None, [1, 2]])
def test_a_pipe_is_made_and_trains(make: Callable[[], nn.Module], name: str, balance: list[int] | None):
    model, given = make(), SAMPLES[name]()
    with closing(GPipe(model, balance, sample=given, devices=["cpu", "cpu"], chunks=2)) as pipe:
        arguments = Arguments((), given) if isinstance(model, Blocks) else given
        pipe.step(arguments, loss_fn=lambda output: output.square().mean())
        assert all(parameter.grad is not None for parameter in pipe.parameters())


@each_sample
def test_balances_take_it(name: str):
    assert sum(balance_by_time(2, sequential(), SAMPLES[name](), timeout=0.01)) == 3
    assert sum(balance_by_size(2, sequential(), SAMPLES[name](), chunks=2)) == 3
    assert sum(balance_by_flops(2, sequential(), SAMPLES[name]())) == 3


@each_model
def test_plans_take_it(make: Callable[[], nn.Module], name: str):
    found = gpipe.plan(make(), SAMPLES[name](), ["cpu", "cpu"], chunks=2, calibrate=False)
    model, given = make(), SAMPLES[name]()
    batch = Arguments((), given) if isinstance(model, Blocks) else given
    with closing(found.build(model)) as pipe:
        pipe.step(batch, loss_fn=lambda output: output.square().mean())


@each_model
def test_checks_take_it(make: Callable[[], nn.Module], name: str):
    assert gpipe.check(make(), SAMPLES[name](), chunks=2).ok
