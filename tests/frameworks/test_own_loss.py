"""``step(**batch)``, ``evaluate(**batch)`` and ``pipe(**batch)`` give the loss of the plain model, or refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, flatten

from .families import ROWS, SIZES, SPECIAL, Family, pictures, text
from .more_families import CLASSES, EVERY, VISION
from .table import set_dropout

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]

Batch = dict[str, Any]
TWO_ROWS = slice(0, 2)


def words(inputs: Batch, padded: bool) -> Batch:
    """A label for each token; of a padded batch ever fewer count, and none at all of one row."""
    found = inputs.get("decoder_input_ids", inputs.get("input_ids")).clone()
    for k, row in enumerate(found if padded else ()):
        row[1 + 3 * k % 7 :] = -100
    if padded:
        found[2] = -100
    return {"labels": found % 128 if not padded else found}


def classes(inputs: Batch, padded: bool) -> Batch:
    """A class for each row; some rows of a padded batch do not count."""
    found = torch.arange(len(next(iter(inputs.values())))) % 5
    return {"labels": found.where(found != 1, -100) if padded else found}


def tags(inputs: Batch, padded: bool) -> Batch:
    found = words(inputs, padded)["labels"]
    return {"labels": found.where(found < 0, found % 5)}


def targets(inputs: Batch, padded: bool) -> Batch:
    return {"labels": torch.linspace(-1, 1, len(next(iter(inputs.values())))).double()}


def answers(inputs: Batch, padded: bool) -> Batch:
    """A position beyond the text does not count, here together for begin and end."""
    rows, length = inputs["input_ids"].shape
    start = torch.arange(rows) % length
    end = (start + 2) % length
    if padded:
        start[1], end[1] = length, length
    return {"start_positions": start, "end_positions": end}


def bert(task: str, **settings: Any) -> Family:
    return EVERY["BERT"]._replace(model=f"BertFor{task}", settings={**CLASSES, **settings})


Labels = Callable[[Batch, bool], Batch]
CASES: dict[str, tuple[Family, Labels]] = {
    **{
        name: (EVERY[name], words)
        for name in (
            *("GPT-2", "Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma 3", "OPT", "Mamba", "Falcon", "BLOOM"),
            *("GPT-NeoX", "T5", "BART", "Whisper"),
        )
    },
    **{name: (EVERY[name], classes) for name in ("DistilBERT", "RoBERTa", "DeBERTa v2", "ViT", "Swin")},
    "BERT masked words": (bert("MaskedLM"), words),
    "BERT tokens": (bert("TokenClassification"), tags),
    "BERT answers": (bert("QuestionAnswering", num_labels=2), answers),
    "BERT regression": (bert("SequenceClassification", num_labels=1), targets),
    "Llama classes": (EVERY["Llama"]._replace(model="LlamaForSequenceClassification"), classes),
}


BRANCHING = ("DeBERTa v2",)
"""Their loss is a constant where no label counts: a micro-batch without labels is refused."""


def batch_of(name: str, rows: int, padded: bool) -> Batch:
    family, labels = CASES[name]
    inputs = family.inputs(rows)
    return {**inputs, **labels(inputs, padded)}


def made(family: Family) -> tuple[nn.Module, nn.Module]:
    settings = {"num_labels": 5} if "LlamaForSequence" in family.model else {}
    model = family.make(**settings)
    set_dropout(model, 0.0)
    return model, copy.deepcopy(model)


def piped(model: nn.Module, sample: Batch) -> GPipe:
    layers = flatten(model, sample)
    half = len(layers) // 2
    return GPipe(layers, [half, len(layers) - half], devices=["cpu"] * 2, chunks=3)


def assert_same(found: Tensor, pipe: GPipe, expected: Tensor, plain: nn.Module, family: Family) -> None:
    bound = max(family.tolerance, 1e-5)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-8, check_dtype=False)
    own = dict(plain.named_parameters(remove_duplicate=False))
    largest = max(float(p.grad.abs().max()) for p in own.values() if p.grad is not None)
    for name, parameter in pipe_parameters(pipe).items():
        gradient = own[name].grad
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert float((parameter.grad - gradient).abs().max()) <= bound * largest


def pipe_parameters(pipe: GPipe) -> dict[str, nn.Parameter]:
    """By the names of the model, which those in a state dict are."""
    return {name: value for name, value in pipe.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_the_plain_model(name: str, padded: bool) -> None:
    family, _ = CASES[name]
    model, plain = made(family)
    pipe = piped(model, batch_of(name, 2, padded=False))
    for more in ({}, *({"num_items_in_batch": items} for items in (11, torch.tensor(11)) if padded)):
        batch: Batch = {**batch_of(name, ROWS + 1, padded), **more}
        plain.zero_grad()
        try:
            expected = plain(**batch).loss
        except TypeError:  # it takes no number of items
            with pytest.raises(TypeError, match="num_items_in_batch"):
                pipe.step(**batch)
            continue
        expected.backward()
        if padded and name in BRANCHING:
            assert_refused(pipe, batch, family)
        else:
            assert_combined(pipe, batch, expected, plain, family)
        pipe.zero_grad()
        whole = pipe(**batch).loss
        whole.backward()
        assert_same(whole, pipe, expected, plain, family)


def assert_combined(pipe: GPipe, batch: Batch, expected: Tensor, plain: nn.Module, family: Family) -> None:
    torch.testing.assert_close(pipe.evaluate(**batch), expected.detach(), rtol=1e-6, atol=1e-8, check_dtype=False)
    pipe.zero_grad()
    assert_same(pipe.step(**batch), pipe, expected, plain, family)


def assert_refused(pipe: GPipe, batch: Batch, family: Family) -> None:
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(
            ValueError, match=rf"{family.model} computes a loss that cannot be put together.*pipe\(\*\*"
        ):
            method(**batch)


CONTRAST = {
    "CLIP": EVERY["CLIP"],
    "SigLIP": Family(
        "SiglipModel",
        "SiglipConfig",
        {
            "text_config": {**SIZES, **SPECIAL, "max_position_embeddings": 64, "projection_size": 32},
            "vision_config": {**VISION, "image_size": 32, "patch_size": 8},
        },
        lambda rows: {**text(rows), **pictures(rows)},
    ),
}


@pytest.mark.parametrize("name", CONTRAST)
def test_a_contrast_within_the_batch_is_refused_by_a_step(name: str) -> None:
    family = CONTRAST[name]
    model, plain = made(family)
    batch = {**family.inputs(ROWS), "return_loss": True}
    pipe = piped(model, {key: value[TWO_ROWS] if isinstance(value, Tensor) else value for key, value in batch.items()})
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(
            ValueError, match=rf"{family.model} computes a loss that cannot be put together.*pipe\(\*\*"
        ):
            method(**batch)
    expected, found = plain(**batch).loss, pipe(**batch).loss
    expected.backward()
    found.backward()
    assert_same(found, pipe, expected, plain, family)
