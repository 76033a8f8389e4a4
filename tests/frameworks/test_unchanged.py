"""Wrapping a Hugging Face model in a pipe leaves it unchanged, and the pipe follows later changes of the model."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import FAMILIES
from .table import distance, gradients


@pytest.fixture(params=["Llama", "GPT-2", "T5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs(family: str, rows: int = 6) -> dict[str, Tensor]:
    found = FAMILIES[family].inputs(rows)
    return {**found, "labels": found["input_ids"]}


def piped(model: nn.Module) -> GPipe:
    return GPipe(model, devices=["cpu"] * 2, chunks=3, checkpoint="never")


def configs(model: nn.Module) -> Iterator[Any]:
    return (module.config for module in model.modules() if hasattr(module, "config"))


def test_its_configuration_is_as_before(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family].make()
    model.save_pretrained(tmp_path / "before")  # type: ignore[operator]
    expected = [each.to_dict() for each in configs(model)]
    pipe = piped(model)
    pipe.step(**inputs(family))
    assert [each.to_dict() for each in configs(model)] == expected
    model.save_pretrained(tmp_path / "after")  # type: ignore[operator]
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert after == before
    assert model.eval()(**inputs(family)).past_key_values is not None


def packed(rows: int = 6) -> dict[str, Tensor]:
    """Two documents in each row."""
    positions = torch.tensor([*range(7), *range(5)]).expand(rows, -1)
    ids = FAMILIES["Llama"].inputs(rows)["input_ids"]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def test_packed_documents_match_model_or_raise() -> None:
    model = FAMILIES["Llama"].make()
    plain = copy.deepcopy(model)
    whole = {**packed(), "position_ids": torch.arange(12).expand(6, -1)}
    masked = {**packed(), "attention_mask": torch.ones(6, 12)}
    pipe = piped(model)
    for batch in ({**packed(), "use_cache": False}, masked, whole):
        for each in (model, plain):
            each.zero_grad()
        expected = plain(**batch).loss
        expected.backward()
        torch.testing.assert_close(pipe.step(**batch), expected.detach())
        assert distance(gradients(model), gradients(plain)) < 1e-5
        torch.testing.assert_close(pipe(**batch).loss, expected)
    for method in (pipe.step, pipe.evaluate, pipe):
        with pytest.raises(ValueError, match=r"position_ids.*use_cache=False"):
            method(**packed())
    apart, together = plain(**packed(), use_cache=False).loss, plain(**packed()).loss
    assert not torch.allclose(apart, together)  # otherwise the error would be unnecessary


def test_pipe_follows_later_settings_of_model(family: str) -> None:
    model = FAMILIES[family].make(dropout=0.5)
    plain = copy.deepcopy(model)
    pipe = piped(model)
    for each in (model, plain):
        each.eval()
        own = each.loss_function
        each.loss_function = lambda *args, own=own, **kwargs: 3 * own(*args, **kwargs)  # type: ignore[assignment]
        each.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[operator]
        each.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 3)  # type: ignore[operator]
    found = pipe.evaluate(**inputs(family))
    torch.testing.assert_close(found, plain(**inputs(family)).loss)
    torch.testing.assert_close(pipe(**inputs(family)).loss, plain(**inputs(family)).loss)
    assert not pipe.training
    pipe.train()
    assert all(module.training for module in model.modules())


def test_a_pipe_answers_for_its_model(tmp_path: Path) -> None:
    model = FAMILIES["Llama"].make()
    pipe = piped(model)
    assert pipe.generation_config is model.generation_config
    assert pipe.get_input_embeddings() is model.get_input_embeddings()  # type: ignore[operator]
    pipe.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert [*again.state_dict()] == [*pipe.state_dict()]


def test_gradient_checkpointing_of_model_works_in_pipe() -> None:
    model = FAMILIES["Llama"].make()
    plain = copy.deepcopy(model)
    pipe = piped(model)
    getattr(pipe, "activation_checkpointing_enable", pipe.gradient_checkpointing_enable)()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    loss = pipe.step(**inputs("Llama"))
    expected = plain(**inputs("Llama")).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert distance(gradients(model), gradients(plain)) < 1e-5


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_recomputation_repeats_embedding_noise(family: str) -> None:
    """A Trainer with ``neftune_noise_alpha`` installs the hook on the pipe's embeddings."""
    neftune = pytest.importorskip("transformers.integrations.neftune")
    model = FAMILIES[family].make()
    pipe = piped(model)

    def trained(checkpoint: str) -> tuple[float, Any]:
        pipe.checkpoint = checkpoint
        pipe.zero_grad()
        torch.manual_seed(5)
        return float(pipe.step(**inputs(family))), gradients(model)

    still, _ = trained("never")
    hook = neftune.activate_neftune(pipe, 5.0)
    (loss, whole), (again, repeated) = trained("never"), trained("always")
    assert abs(loss - still) > 1e-4
    assert again == pytest.approx(loss)
    assert distance(repeated, whole) < 1e-5
    neftune.deactivate_neftune(pipe, hook)
    assert trained("always")[0] == pytest.approx(still)


def tie(model: Any) -> None:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


def assign(model: nn.Module) -> None:
    model.load_state_dict({key: value * 1.1 for key, value in model.state_dict().items()}, assign=True)


CHANGES: dict[str, Any] = {
    "dtype": lambda model: model.float(),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "tied": tie,
    "assigned": assign,
    "words": lambda model: model.resize_token_embeddings(150),
}


@pytest.mark.parametrize("change", CHANGES)
def test_pipe_follows_later_changes_of_model(family: str, change: str) -> None:
    model = FAMILIES[family].make()
    plain = copy.deepcopy(model)
    pipe = piped(model)
    for each in (model, plain):
        torch.manual_seed(0)
        CHANGES[change](each)
    expected = plain(**inputs(family)).loss
    expected.backward()
    loss = pipe.step(**inputs(family))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    assert distance(gradients(model), gradients(plain)) < 1e-4
