"""``gpipe.check`` finds nothing in models of Hugging Face with labels and dropout."""

import pytest
import torch

from gpipe import check

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
