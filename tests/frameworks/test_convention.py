"""Losses divided by ``num_items_in_batch``, as in transformers, are computed per micro-batch under 1F1B."""

from contextlib import closing
from typing import Any

import pytest
import torch

from gpipe import Arguments, GPipe

from ..own_forward import CHUNKS, STAGES, Case, called, expect_close, expect_gradients
from .families import ROWS
from .labelled import ADDS, BATCHES, CASES, batch_of, made

pytestmark = pytest.mark.filterwarnings("ignore")
OFTEN = ("GPT-2", "Llama", "T5", "BERT classes", "Mixtral", "Mixtral balanced", "CLIP", "ViT")
BATCHES = [(name, kind) for name, kind in BATCHES if kind != "unpadded"]


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*each, marks=[] if each[0] in OFTEN else [pytest.mark.long]) for each in BATCHES]
)
def test_later_steps_have_1f1b_if_losses_add_up(name: str, kind: str) -> None:
    family, _ = CASES[name]
    model, plain = made(family)
    bound = max(family.tolerance, 1e-6)
    batch: dict[str, Any] = batch_of(name, ROWS + 1, kind)
    case = Case(model, Arguments((), batch))
    with closing(GPipe(model, devices=["cpu"] * STAGES, chunks=CHUNKS)) as pipe:
        pipe.checkpoint = "never"
        expected = plain(**batch).loss
        expected.backward()
        for schedule in (None, None, *(["zero_bubble"] if name in ADDS else [])):
            pipe.zero_grad()
            with called(model, pipe.block_names) as found:
                loss = pipe.step(**batch, schedule=schedule)
            expect_close(loss, expected, bound, "loss")
            expect_gradients(case, plain)
            assert all(thread.startswith("gpipe forward") for _, thread in found)
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == ("zero_bubble" if name in ADDS else "fill_drain")
        with torch.no_grad():
            for _ in range(2):
                expect_close(pipe.evaluate(**batch), expected, bound, "loss")
