"""Blocks of transformers that draw from NumPy's generator compute what they do in a plain loop."""

import copy
from contextlib import closing
from typing import Any

import pytest
import torch

from gpipe import Arguments, GPipe

from ..own_forward import Case, expect_close, expect_gradients
from .families import transformers
from .table import set_dropout

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_random_attention_of_big_bird_matches(checkpoint: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    config = transformers.BigBirdConfig(
        **sizes, vocab_size=64, num_attention_heads=2, block_size=4, num_random_blocks=2, max_position_embeddings=128
    )
    model = transformers.BigBirdForMaskedLM(config).double().train()
    assert config.attention_type == "block_sparse"
    set_dropout(model, 0.0)
    plain = copy.deepcopy(model)
    tokens = torch.randint(2, 64, (6, 96))
    batch = {"input_ids": tokens, "labels": tokens}
    losses = [plain(input_ids=part, labels=part).loss / 3 for part in tokens.chunk(3)]
    for loss in losses:
        loss.backward()
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)) as pipe:
        for _ in range(3):
            pipe.zero_grad()
            loss = pipe.step(Arguments((), batch), reduction="mean", schedule="1f1b")
            expect_close(loss, sum(losses), 1e-9, "loss")
            expect_gradients(Case(model, Arguments((), batch), bound=1e-9), plain)
