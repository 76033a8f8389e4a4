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
EXPERTS = {**DECODER, "head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYERS = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
TRANSLATOR = {**LAYERS, **SPECIAL, "vocab_size": WORDS, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SEEING = {**VISION, "image_size": 32, "patch_size": 8}
PAIRS: dict[str, Any] = {"depths": [2, 2], "num_labels": 5}
SEGMENTS: dict[str, Any] = {
    **{"num_encoder_blocks": 2, "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], **PAIRS},
    **{"strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
}
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
    """A model configuration, and a function that creates its inputs.

    Attributes:
        model: its name in ``transformers``.
        settings: keyword arguments of the configuration.
        inputs: makes a batch.
        dropout: names of settings that are probabilities of dropout.
        tolerance: relative, of gradients in float64; some families compute parts in float32.
        by_micro_batch: whether the model depends on the full batch, like batch norm.
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


def waves(rows: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(rows, 200, generator=torch.Generator().manual_seed(rows)).double()}


def heard(rows: int) -> dict[str, Tensor]:
    return {**sounds(rows), "decoder_input_ids": text(rows)["input_ids"]}


def bytes_of(rows: int) -> dict[str, Tensor]:
    return {("inputs" if name == "input_ids" else name): value for name, value in text(rows).items()}


def decoder(model: str, tolerance: float = 1e-9, **settings: Any) -> Family:
    return Family(f"{model}ForCausalLM", {**DECODER, **settings}, tolerance=tolerance)


def experts(model: str, **settings: Any) -> Family:
    """Grouped matrix products are in single precision only."""
    return Family(f"{model}ForCausalLM", {**EXPERTS, **settings}, tolerance=1e-3, dtype=torch.float32)


def classifier(model: str, settings: dict[str, Any], inputs: Any = text) -> Family:
    return Family(f"{model}ForSequenceClassification", settings, inputs)


def image_classifier(model: str, settings: dict[str, Any], by_micro_batch: bool = False) -> Family:
    return Family(f"{model}ForImageClassification", settings, pictures, by_micro_batch=by_micro_batch)


MORE = {
    "GPT": Family("OpenAIGPTLMHeadModel", GPT),
    "CTRL": Family("CTRLLMHeadModel", {**GPT, "dff": 64}),
    "GPT-NeoX": decoder("GPTNeoX"),
    "GPT-J": Family("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "Falcon": decoder("Falcon"),
    "BLOOM": Family("BloomForCausalLM", {**GPT, "hidden_size": 32}),
    "MPT": Family(
        "MptForCausalLM", {"vocab_size": WORDS, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}
    ),
    "Phi": decoder("Phi"),
    "Phi-3": decoder("Phi3"),
    "Gemma 2": decoder("Gemma2", tolerance=1e-5, head_dim=8, sliding_window=4),
    "OLMo 2": decoder("Olmo2"),
    "Cohere": decoder("Cohere", tolerance=1e-5),
    "StarCoder 2": decoder("Starcoder2"),
    "Granite": decoder("Granite"),
    "SmolLM3": decoder("SmolLM3"),
    "Nemotron": decoder("Nemotron"),
    "Llama 4": decoder("Llama4", head_dim=8, num_local_experts=4, intermediate_size_mlp=64, attention_chunk_size=8),
    "Qwen3-MoE": experts("Qwen3Moe", num_experts=4),
    "DeepSeek-V3": experts(
        "DeepseekV3",
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"v_head_dim": 8, "head_dim": 4},
    ),
    "gpt-oss": experts("GptOss", num_local_experts=4, sliding_window=4),
    "Mamba 2": Family(
        "Mamba2ForCausalLM",
        {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        unmasked,
        tolerance=1e-5,
    ),
    "DistilBERT": classifier(
        "DistilBert", {"vocab_size": WORDS, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "num_labels": 5}
    ),
    "RoBERTa": classifier("Roberta", CLASSES),
    "ELECTRA": classifier("Electra", {**CLASSES, "embedding_size": 32}),
    "DeBERTa v2": classifier(
        "DebertaV2",
        {**CLASSES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    ),
    "ModernBERT": classifier("ModernBert", {**CLASSES, "global_attn_every_n_layers": 2, "local_attention": 4}),
    "Longformer": classifier("Longformer", {**CLASSES, "attention_window": 4}),
    "FNet": classifier("FNet", {**CLASSES, "tpu_short_seq_length": 12}, unmasked),
    "Perceiver": classifier(
        "Perceiver",
        {"vocab_size": WORDS, "d_model": 16, "num_latents": 8, "d_latents": 16, "num_blocks": 1, "num_labels": 5}
        | {"num_self_attends_per_block": 3, "num_self_attention_heads": 4, "num_cross_attention_heads": 4}
        | {"max_position_embeddings": 64},
        bytes_of,
    ),
    "XLNet": Family("XLNetLMHeadModel", {"vocab_size": WORDS, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 64}),
    "ALBERT": classifier("Albert", {**CLASSES, "embedding_size": 16}),
    "BART": Family("BartForConditionalGeneration", {**TRANSLATOR, "max_position_embeddings": 64}, translated),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {**TRANSLATOR, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64}
        | {"decoder_start_token_id": 1},
        heard,
    ),
    "Wav2Vec2": classifier(
        "Wav2Vec2",
        {**SIZES, "conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
        | {"num_labels": 5, "apply_spec_augment": False, "layerdrop": 0.0},
        waves,
    ),
    "CLIP": Family(
        "CLIPModel",
        {"text_config": {**SIZES, **SPECIAL}, "vision_config": SEEING},
        lambda rows: {**text(rows), **pictures(rows)},
        by_micro_batch=True,  # it compares every text with every picture
    ),
    "CLIP vision": Family("CLIPVisionModel", SEEING, pictures),
    "SigLIP vision": Family("SiglipVisionModel", SEEING, pictures),
    "DeiT": image_classifier("DeiT", VIT),
    "BEiT": image_classifier("Beit", VIT),
    "DINOv2": image_classifier("Dinov2", VIT),
    "Swin": image_classifier(
        "Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4, **PAIRS}
    ),
    "SegFormer": image_classifier("Segformer", SEGMENTS),
    "SegFormer, pixels": Family(
        "SegformerForSemanticSegmentation", {**SEGMENTS, "decoder_hidden_size": 16}, pictures, by_micro_batch=True
    ),
    "RegNet": image_classifier(
        "RegNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "groups_width": 4, **PAIRS}, by_micro_batch=True
    ),
    "ConvNeXt": image_classifier("ConvNext", {"hidden_sizes": [8, 16], "num_stages": 2, **PAIRS}),
    "ResNet": image_classifier(
        "ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic", **PAIRS}, by_micro_batch=True
    ),
}
EVERY = FAMILIES | MORE
