"""``gpipe.check`` finds nothing in models of Hugging Face with labels and dropout."""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import nn

from gpipe import GPipe, check

from .families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_without_a_pipe(name: str) -> None:
    family = FAMILIES[name]
    batch = family.inputs(8)
    if "Classification" in family.model:
        batch["labels"] = torch.arange(8) % 5
    elif "For" in family.model:
        batch["labels"] = batch.get("decoder_input_ids", batch.get("input_ids"))
    report = check(family.make(dropout=0.1), batch, chunks=3)
    assert report.ok, str(report)
    assert report.compared


def _lily() -> nn.Module:
    peft = pytest.importorskip("peft")
    if not hasattr(peft, "LilyConfig"):
        pytest.skip("this peft has no Lily")
    model = FAMILIES["Llama"].make()
    settings = {"target_modules": ["q_proj"], "r": 2, "stride_A": 1, "num_B": 2}
    return peft.get_peft_model(model, peft.LilyConfig(**settings)).train()


def _float8() -> nn.Module:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    model = FAMILIES["Llama"].make()
    return float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True)).train()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_lily, _float8])
def test_step_names_layers_that_mix_rows(make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    batch = FAMILIES["Llama"].inputs(4)
    with closing(GPipe(make(), devices=["cpu"] * 2, chunks=2)) as pipe, caplog.at_level("WARNING", "gpipe"):
        pipe.step(**batch, labels=batch["input_ids"])
    assert any("computes each row from all rows" in record.getMessage() for record in caplog.records)
