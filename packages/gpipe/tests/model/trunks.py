"""A model with a trunk of blocks, or two, and all that real models have around them."""

import copy
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH, ROWS = 4, 6


class Mix(nn.Module):
    """A block with a mask, a scale that may be a number, and more than one result."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, hidden: Tensor, mask: Tensor | None, *, scale: float = 1.0) -> tuple[Tensor, None]:
        found = self.dropout(self.linear(hidden + self.shift).tanh()) * scale
        return (found if mask is None else found * mask), None


class Model(nn.Module):
    """A trunk, or two, with all that real models have around them."""

    def __init__(
        self, blocks: int = 3, others: int = 0, *, token: bool = False, scale: float = 1.0, dropout: float = 0.0
    ):
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.token = nn.Parameter(torch.full((WIDTH,), 0.5)) if token else None
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(Mix(dropout) for _ in range(blocks))
        self.middle = nn.LayerNorm(WIDTH)
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(others))
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
        self.scale = scale

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        hidden = self.embed(x).relu()
        if self.token is not None:
            hidden = hidden + self.token
        if mask is not None:
            mask = mask.unsqueeze(-1) * 0.5
        for block in self.body.blocks:
            hidden = block(hidden, mask, scale=self.scale)[0]
        hidden = self.middle(hidden)
        for other in self.others:
            hidden = other(hidden)
        logits = self.head(hidden * self.factor)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def batch(rows: int = ROWS, *, mask: bool = True, labels: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    found = {"x": torch.randn(rows, 2, generator=generator, dtype=torch.float64)}
    if mask:
        found["mask"] = torch.rand(rows, generator=generator, dtype=torch.float64)
    if labels:
        found["labels"] = torch.randint(3, (rows,), generator=generator)
    return found


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and the same once more."""
    torch.manual_seed(1)
    model = Model(**options).double()
    return model, copy.deepcopy(model)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw options for a model, and for its batches."""
    options = {
        "blocks": draw(st.integers(2, 4)),
        "others": draw(st.sampled_from([0, 2, 3])),
        "token": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 0.5])),
    }
    return options, {"mask": draw(st.booleans()), "labels": False}
