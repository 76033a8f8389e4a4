"""Batches with labels for families that compute a loss: padded, unpadded, and with several documents in a row."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .families import CLASSES, EVERY, Family
from .table import set_dropout

Batch = dict[str, Any]


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
    "ALBERT masked words": (EVERY["ALBERT"]._replace(model="AlbertForMaskedLM"), words),
    "BERT tokens": (bert("TokenClassification"), tags),
    "BERT answers": (bert("QuestionAnswering", num_labels=2), answers),
    "BERT regression": (bert("SequenceClassification", num_labels=1), targets),
    "Llama classes": (EVERY["Llama"]._replace(model="LlamaForSequenceClassification"), classes),
}


BRANCHING = ("DeBERTa v2",)
"""Their loss is a constant where no label counts: a micro-batch without labels is refused."""
PACKED = ("GPT-2", "Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma 3", "OPT", "Falcon", "GPT-NeoX")
"""They take positions, which begin again with each document of a row."""
BATCHES = [(name, kind) for name in CASES for kind in ("unpadded", "padded", "packed")]
BATCHES = [(name, kind) for name, kind in BATCHES if kind != "packed" or name in PACKED]


def batch_of(name: str, rows: int, kind: str) -> Batch:
    family, labels = CASES[name]
    inputs = family.inputs(rows)
    if kind == "packed":
        positions = torch.tensor([*range(7), *range(5)]).expand(rows, -1)
        inputs = {"input_ids": inputs["input_ids"], "position_ids": positions, "use_cache": False}
    return {**inputs, **labels(inputs, kind == "padded")}


def made(family: Family) -> tuple[nn.Module, nn.Module]:
    settings = {"num_labels": 5} if "LlamaForSequence" in family.model else {}
    model = family.make(**settings)
    set_dropout(model, 0.0)
    return model, copy.deepcopy(model)
