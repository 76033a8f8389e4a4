"""Hugging Face's outputs are trees too; the tests say so where that library is."""

import pytest
import torch

from microbatch import Batch, Replicate, check, gather, scatter

outputs = pytest.importorskip("transformers.modeling_outputs", exc_type=ImportError)


def test_round_trip() -> None:
    value = outputs.BaseModelOutput(last_hidden_state=torch.randn(5, 3), hidden_states=(torch.randn(5, 2),))
    check(value)
    batches = scatter(value, 3)
    assert len(batches) == 3
    assert all(type(batch.value) is type(value) for batch in batches)
    result = gather(batches)
    assert type(result) is type(value)
    assert result.last_hidden_state.equal(value.last_hidden_state)
    assert result.hidden_states[0].equal(value.hidden_states[0])
    assert result.attentions is None


def test_paths_and_specs_go_by_key() -> None:
    value = outputs.CausalLMOutput(loss=torch.tensor(1.0), logits=torch.randn(4, 3))
    assert len(Batch(value)) == 2
    with pytest.raises(ValueError, match=r"input\['loss'\] has shape \(\)"):
        scatter(value, 2)
    spec = {"loss": Replicate(), "logits": None}
    assert gather(scatter(value, 2, spec), spec).loss is value.loss
