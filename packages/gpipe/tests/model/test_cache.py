"""Models whose results depend on their cache, which is disabled in a pipe, raise."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe


class Layer(nn.Module):
    """Takes what an earlier layer computed, if that is kept, as layers of Gemma 3n do."""

    def __init__(self, config: Any, *, is_shared: bool) -> None:
        super().__init__()
        self.linear, self.config, self.is_kv_shared_layer = nn.Linear(2, 2), config, is_shared

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        if self.is_kv_shared_layer and cache is not None:
            return x + cache[-1]
        y = self.linear(x)
        if cache is not None:
            cache.append(y)
        return x + y


class PassesStates(Layer):
    """Gets it as an argument, as in later versions of transformers."""

    def forward(self, x: Tensor, cache: list[Tensor] | None, shared_kv_states: Any = None) -> Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self, kind: type[Layer], shared: int, *, nested: bool) -> None:
        super().__init__()
        own = SimpleNamespace(use_cache=True, num_kv_shared_layers=shared)
        self.config = SimpleNamespace(use_cache=True, text_config=own) if nested else own
        self.layers = nn.ModuleList(kind(own, is_shared=k >= 4 - shared) for k in range(4))

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Tensor:
        cache: list[Tensor] | None = [] if (self.config.use_cache if use_cache is None else use_cache) else None
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("nested", [False, True])
def test_layers_that_share_by_cache_are_refused(nested: bool) -> None:
    model = Model(Layer, 2, nested=nested)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for run in (pipe, pipe.evaluate, lambda x: pipe.step(x, loss_fn=lambda y: y.sum(), reduction="sum")):
            with pytest.raises(ValueError, match=r"layer 'layers\.2' takes keys and values of an earlier layer"):
                run(torch.ones(4, 2))
        torch.testing.assert_close(pipe(torch.ones(4, 2), use_cache=False), model(torch.ones(4, 2), use_cache=False))


@pytest.mark.parametrize(("kind", "shared"), [(PassesStates, 2), (Layer, 0)])
def test_other_layers_are_not(kind: type[Layer], shared: int) -> None:
    model = Model(kind, shared, nested=False)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        torch.testing.assert_close(pipe(torch.ones(4, 2)), model(torch.ones(4, 2)))
