"""Batches with labels for families that compute a loss: padded, unpadded, and with several documents in a row."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .families import CLASSES, EVERY, SEEING, SIZES, SPECIAL, Family, pictures, text
from .table import set_dropout

Batch = dict[str, Any]


def words(inputs: Batch, padded: bool) -> Batch:
    """Return one label per token. In a padded batch later rows have fewer labels, and one row has none."""
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


def kinds(inputs: Batch, padded: bool) -> Batch:
    """Each row may be of several classes."""
    rows = len(inputs["input_ids"])
    return {"labels": (torch.arange(rows * 5).reshape(rows, 5) % 3 == 0).double()}


def sentences(inputs: Batch, padded: bool) -> Batch:
    return {**words(inputs, padded), "next_sentence_label": torch.arange(len(inputs["input_ids"])) % 2}


def characters(inputs: Batch, padded: bool) -> Batch:
    rows = len(inputs["input_values"])
    found = 1 + torch.arange(rows * 6).reshape(rows, 6) % 30
    for k, row in enumerate(found if padded else ()):
        row[1 + k % 5 :] = -100
    return {"labels": found}


def pairs(inputs: Batch, padded: bool) -> Batch:
    """Return only a flag: each text is compared with each picture."""
    return {"return_loss": True}


def bert(task: str, **settings: Any) -> Family:
    return EVERY["BERT"]._replace(model=f"BertFor{task}", settings={**CLASSES, **settings})


def balanced(family: Family) -> Family:
    """Enable the load-balancing loss, computed from the router outputs of all tokens."""
    return family._replace(settings={**family.settings, "output_router_logits": True, "router_aux_loss_coef": 0.5})


SIGLIP = Family(
    "SiglipModel",
    {"text_config": {**SIZES, **SPECIAL, "projection_size": 32}, "vision_config": SEEING},
    lambda rows: {**text(rows), **pictures(rows)},
    by_micro_batch=True,
)
LETTERS = {"vocab_size": 32, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True}
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
    "BERT several classes": (bert("SequenceClassification", problem_type="multi_label_classification"), kinds),
    "BERT sentences": (bert("PreTraining"), sentences),
    "Qwen3-MoE": (EVERY["Qwen3-MoE"], words),
    "Mixtral balanced": (balanced(EVERY["Mixtral"]), words),
    "Qwen3-MoE balanced": (balanced(EVERY["Qwen3-MoE"]), words),
    "Wav2Vec2 characters": (
        EVERY["Wav2Vec2"]._replace(model="Wav2Vec2ForCTC", settings={**EVERY["Wav2Vec2"].settings, **LETTERS}),
        characters,
    ),
    "CLIP": (EVERY["CLIP"], pairs),
    "SigLIP": (SIGLIP, pairs),
}


PACKED = ("GPT-2", "Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma 3", "OPT", "Falcon", "GPT-NeoX")
"""They take positions, which begin again with each document of a row."""
ADDS = (*PACKED, "Mamba", "BLOOM", "Qwen3-MoE", "ViT", "Swin")
"""Their losses of micro-batches add up, by the convention of ``num_items_in_batch``; others are computed once."""
BATCHES = [(name, kind) for name in CASES for kind in ("unpadded", "padded", "packed")]
BATCHES = [(name, kind) for name, kind in BATCHES if kind != "packed" or name in PACKED]


def batch_of(name: str, rows: int, kind: str) -> Batch:
    family, labels = CASES[name]
    inputs: Batch = dict(family.inputs(rows))
    if kind == "packed":
        positions = torch.tensor([*range(7), *range(5)]).expand(rows, -1)
        inputs = {"input_ids": inputs["input_ids"], "position_ids": positions, "use_cache": False}
    return {**inputs, **labels(inputs, kind == "padded")}


def made(family: Family) -> tuple[nn.Module, nn.Module]:
    settings = {"num_labels": 5} if "LlamaForSequence" in family.model else {}
    model = family.make(**settings)
    set_dropout(model, 0.0)
    return model, copy.deepcopy(model)
