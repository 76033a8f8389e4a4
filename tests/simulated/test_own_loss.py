"""The loss that a flattened model computes, on several devices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe import GPipe, flatten

from .accelerator import device


class Words(nn.Module):
    """Its head may have a row for each token."""

    def __init__(self, *, by_rows: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.places = nn.Parameter(torch.randn(6, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.by_rows = by_rows

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        hidden = self.embed(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden if self.by_rows else hidden.flatten(0, 1)).reshape(*tokens.shape, 7)
        logits = logits * self.temperature
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(rows: int) -> dict[str, Tensor]:
    tokens = torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(rows))
    labels = tokens.flip(1).clone()
    for k, row in enumerate(labels):
        row[1 + k % 5 :] = -100
    return {"tokens": tokens, "labels": labels}


@pytest.mark.parametrize("by_rows", [True, False])
def test_it_is_that_of_the_plain_model(by_rows: bool) -> None:
    torch.manual_seed(0)
    plain = Words(by_rows=by_rows)
    model = copy.deepcopy(plain).to(device(0))
    sample = {name: tensor.to(device(0)) for name, tensor in batch(2).items()}
    pipe = GPipe(flatten(model, sample), [2, 3], devices=[device(0), device(1)], chunks=3)
    expected = plain(**batch(7))
    expected["loss"].backward()
    found = pipe(**batch(7))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].cpu(), tensor)
    for run in (found["loss"].backward, lambda: pipe.step(**batch(7))):
        pipe.zero_grad()
        run()
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), other.grad)
    torch.testing.assert_close(pipe.evaluate(**batch(7)).cpu(), expected["loss"].detach())
    torch.testing.assert_close(pipe(batch(7)["tokens"])["logits"].cpu(), expected["logits"])
