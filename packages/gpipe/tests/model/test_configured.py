"""Changes of numbers in a model that may affect its loss are detected."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe.model._configured import LONG, collect_settings


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)
        self.register_buffer("factor", torch.zeros(()))
        self.other, self.scale, self.scales, self.long = torch.zeros(()), 0.0, [0.0], [0] * LONG
        self.config = SimpleNamespace(scale=0.0, text_config=SimpleNamespace(scale=0.0))
        self.settings = SimpleNamespace(scale=0.0)


def key(model: Any) -> int:
    return collect_settings(model, model.layers).key


def set_buffer(model: Any) -> None:
    model.factor = torch.zeros(())


CHANGES: list[Callable[[Any], Any]] = [
    lambda model: model.factor.fill_(1),
    set_buffer,
    lambda model: model.other.add_(1),
    lambda model: setattr(model, "scale", 1.0),
    lambda model: model.scales.append(1.0),
    lambda model: model.long.append(1),
    lambda model: setattr(model.config, "scale", 1.0),
    lambda model: setattr(model.config.text_config, "scale", 1.0),
    lambda model: setattr(model.settings, "scale", 1.0),
    lambda model: model.head.eval(),
    lambda model: model.head.register_forward_hook(print),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_outside_of_blocks_is_seen(change: Callable[[Any], Any]) -> None:
    model = Model()
    before = key(model)
    assert key(model) == before
    change(model)
    assert key(model) != before


def test_changes_of_parameters_and_blocks_are_ignored() -> None:
    model = Model()
    before = key(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.layers[0].scale = 1.0  # type: ignore[assignment]
    assert key(model) == before


def test_identities_are_not_reused() -> None:
    model: Any = Model()
    known = collect_settings(model, model.layers)
    found = set()
    for _ in range(20):
        model.other = torch.zeros(())
        found.add(key(model))
    assert known.key not in found
