"""Models with one table for words and for logits, as they are by default, train for some steps as by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe import Arguments, GPipe

from .families import FAMILIES, ROWS

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize(
    ("name", "stages", "schedule", "mode"),
    [("GPT-2", 2, "1f1b", "always"), ("GPT-2", 3, "zero_bubble", "never"), ("T5", 3, "1f1b", "except_last")],
)
def test_three_steps_are_those_of_the_model(name: str, stages: int, schedule: str, mode: str) -> None:
    family = FAMILIES[name]
    model = family.make()
    plain = copy.deepcopy(model)
    inputs = family.inputs(ROWS)
    pipe = GPipe(model, sample=family.inputs(2), devices=["cpu"] * stages, chunks=3, checkpoint=mode)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in (pipe, plain)]
    for _ in range(3):
        pipe.step(Arguments((), inputs), loss_fn=lambda out, _: out.square().mean(), schedule=schedule)
        plain(**inputs)["logits"].square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(state(model), state(plain), rtol=1e-9, atol=1e-9)
    assert set(pipe.state_dict()) == set(plain.state_dict())
    assert len(list(pipe.parameters())) == len(list(plain.parameters()))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}
