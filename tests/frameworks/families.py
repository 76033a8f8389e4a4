"""Small models of many families, from configurations: nothing is downloaded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed; see nox -s frameworks")
transformers.logging.set_verbosity_error()

WORDS, ROWS, LENGTH = 128, 6, 12
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES = {**VISION, "vocab_size": WORDS}
VIT = {**VISION, "image_size": 32, "patch_size": 8, "num_labels": 5}
CLASSES = {**SIZES, "num_labels": 5, "pad_token_id": 0}
DECODER = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": WORDS, "n_positions": 64, **SPECIAL}
MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, **SPECIAL}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def text(rows: int) -> dict[str, Tensor]:
    """Token numbers, and a mask over padding."""
    generator = torch.Generator().manual_seed(rows)
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[: rows // 2, LENGTH * 3 // 4 :] = 0
    return {"input_ids": torch.randint(3, WORDS, (rows, LENGTH), generator=generator), "attention_mask": mask}


def unmasked(rows: int) -> dict[str, Tensor]:
    return {"input_ids": text(rows)["input_ids"]}


def translated(rows: int) -> dict[str, Tensor]:
    return {**text(rows), "decoder_input_ids": text(rows)["input_ids"].flip(1)}


def pictures(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(rows, 3, 32, 32, generator=torch.Generator().manual_seed(rows)).double()}


def sounds(rows: int) -> dict[str, Tensor]:
    return {"input_features": torch.rand(rows, 8, 24, generator=torch.Generator().manual_seed(rows)).double()}


class Family(NamedTuple):
    """How to make a model, and what it takes.

    Attributes:
        model: its name in ``transformers``.
        settings: of the configuration.
        inputs: makes a batch.
        dropout: names of settings that are probabilities of dropout.
        tolerance: relative, of gradients in float64; some families compute parts in float32.
        by_micro_batch: whether the model looks at a batch as a whole, as batch norm does.
    """

    model: str
    settings: dict[str, Any]
    inputs: Callable[[int], dict[str, Tensor]] = text
    dropout: tuple[str, ...] = ()
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64
    by_micro_batch: bool = False

    def make(self, dropout: float = 0.0, **others: Any) -> nn.Module:
        """The model, in training mode, with ``others`` among its settings; equal for each call."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        config = kind.config_class(**{**self.settings, **dict.fromkeys(self.dropout, dropout), **others})
        return kind(config).to(self.dtype).train()


FAMILIES = {
    "GPT-2": Family("GPT2LMHeadModel", {**GPT, "n_head": 2}, dropout=GPT2_DROPOUT),
    "Llama": Family("LlamaForCausalLM", DECODER, dropout=("attention_dropout",)),
    "Qwen2": Family(
        "Qwen2ForCausalLM", {**DECODER, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    ),
    "Qwen3": Family("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "Mistral": Family("MistralForCausalLM", {**DECODER, "head_dim": 8}),
    "Mixtral": Family("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}, tolerance=1e-3, dtype=torch.float32),
    "Gemma 3": Family(
        "Gemma3ForCausalLM",
        {**DECODER, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        tolerance=1e-5,
    ),
    "BERT": Family("BertForSequenceClassification", CLASSES, dropout=BERT_DROPOUT),
    "OPT": Family(
        "OPTForCausalLM",
        {**SIZES, **SPECIAL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
        dropout=("dropout",),
    ),
    "Mamba": Family("MambaForCausalLM", MAMBA, unmasked, tolerance=1e-5),
    "T5 encoder": Family("T5EncoderModel", T5, dropout=("dropout_rate",)),
    "T5": Family(
        "T5ForConditionalGeneration",
        {**T5, "num_decoder_layers": 3, "decoder_start_token_id": 0},
        translated,
        ("dropout_rate",),
    ),
    "ViT": Family("ViTForImageClassification", VIT, pictures, BERT_DROPOUT),
    "Whisper encoder": Family(
        "WhisperForAudioClassification",
        {"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 8}
        | {"max_source_positions": 12, "num_labels": 5, "classifier_proj_size": 16},
        sounds,
        ("dropout",),
    ),
}
