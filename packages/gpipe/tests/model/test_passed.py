"""What a block adds to a list or dict of the model is there, as in the model, or is refused."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import MODES, assert_same, rows
from .residuals import Residuals, plain_of
from .test_forward import done


class Adding(nn.Module):
    def __init__(self, add: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(3, 3), add

    def forward(self, x: Tensor, found: Any, *, others: Any) -> Tensor:
        y = self.linear(x)
        self.add(found, y)
        others["inner"].append(x)
        return y.tanh()


class Collecting(Residuals):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        found, others = self.made(x), {"inner": [x]}
        for layer in self.layers:
            x = x + layer(x, found, others=others)
        values = found.values() if isinstance(found, dict) else found
        return self.head(x + sum(values)) + sum(others["inner"])


def replace(found: list[Tensor], y: Tensor) -> None:
    found[0] = found[0] * y.exp()


MODELS = {
    "a list": (lambda x: [x * 2], lambda found, y: found.append(y)),
    "an empty list": (lambda x: [], lambda found, y: found.append(y)),
    "a dict": (lambda x: {}, lambda found, y: found.update({str(len(found)): y})),
    "a replaced element": (lambda x: [x * 2], replace),
    "a shorter list": (lambda x: [x * k for k in range(6)], lambda found, y: found.pop()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "whole", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_in_the_model_or_refused(name: str, stages: int, how: str, mode: str) -> None:
    make, add = MODELS[name]
    model, x = Collecting(*(Adding(add) for _ in range(4))), rows(6)
    model.made = make
    with closing(GPipe(model, devices=["cpu"] * stages, chunks=3, checkpoint=mode)) as pipe:
        plain = plain_of(pipe)
        if how in ("call", "whole"):
            with pytest.raises(RuntimeError, match=r"block 'layers\.0' changes a list or dict"):
                done(pipe, x, how)
            return
        done(pipe, x, how)
    plain(x).square().sum().backward()
    assert_same(model, plain)
