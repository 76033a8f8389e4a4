"""Models of diffusers, made small, with a batch for each."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe import Arguments
from microbatch import Replicate

from ..own_forward import Case, of_all_rows

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed; see nox -s outside")

ROWS = 6
TIMES = torch.arange(ROWS) * 100


def values(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(sum(shape)))


UNET = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
CONDITIONED = {**UNET, "cross_attention_dim": 16, "attention_head_dim": 4}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
CODER: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4, "latent_channels": 4}
CODER |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
SEEN = {"encoder_hidden_states": values(5, 16)}
FLUX_IDS = {"txt_ids": torch.zeros(5, 3), "img_ids": torch.zeros(16, 3)}
WHOLE = ("txt_ids", "img_ids", "img_shapes")
"""Inputs without a batch dimension."""
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        {**UNET, "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": values(3, 16, 16), "timestep": TIMES},
    ),
    "UNet2DConditionModel": ({**CONDITIONED, **CROSS}, {"sample": values(4, 16, 16), "timestep": TIMES, **SEEN}),
    "UNet3DConditionModel": (
        {**CONDITIONED, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D")}
        | {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        {"sample": values(4, 3, 16, 16), "timestep": TIMES, **SEEN},
    ),
    "AutoencoderKL": (CODER, {"sample": values(3, 16, 16)}),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1)}
        | {"num_decoder_blocks": (1, 1)},
        {"sample": values(3, 16, 16)},
    ),
    "VQModel": ({**CODER, "num_vq_embeddings": 16}, {"sample": values(3, 16, 16)}),
    "DiTTransformer2DModel": (
        {**HEADS, "in_channels": 4, "sample_size": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 10},
        {"hidden_states": values(4, 8, 8), "timestep": torch.arange(ROWS), "class_labels": torch.arange(ROWS)},
    ),
    "PixArtTransformer2DModel": (
        {**HEADS, "in_channels": 4, "sample_size": 8, "cross_attention_dim": 16, "caption_channels": 16},
        {"hidden_states": values(4, 8, 8), "timestep": TIMES, "added_cond_kwargs": {}, **SEEN},
    ),
    "SD3Transformer2DModel": (
        {**HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16}
        | {"caption_projection_dim": 16, "pooled_projection_dim": 16, "pos_embed_max_size": 8},
        {"hidden_states": values(4, 8, 8), "timestep": TIMES, "pooled_projections": values(16), **SEEN},
    ),
    "FluxTransformer2DModel": (
        {**HEADS, "in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16}
        | {"axes_dims_rope": (4, 2, 2)},
        {"hidden_states": values(16, 4), "timestep": TIMES / 1000, "pooled_projections": values(16)}
        | {"guidance": None, **FLUX_IDS, **SEEN},
    ),
    "SanaTransformer2DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8}
        | {"cross_attention_dim": 16, "caption_channels": 16, "sample_size": 8},
        {"hidden_states": values(4, 8, 8), "timestep": TIMES, **SEEN},
    ),
    "WanTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
        | {"rope_max_seq_len": 32},
        {"hidden_states": values(4, 2, 8, 8), "timestep": TIMES, **SEEN},
    ),
    "LTXVideoTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": 16},
        {"hidden_states": values(8, 4), "timestep": TIMES, "num_frames": 2, "height": 2, "width": 2}
        | {"encoder_attention_mask": torch.ones(ROWS, 5), **SEEN},
    ),
    "CogVideoXTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 5, "max_text_seq_length": 5},
        {"hidden_states": values(2, 4, 8, 8), "timestep": TIMES, **SEEN},
    ),
    "QwenImageTransformer2DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (4, 2, 2)},
        {"hidden_states": values(16, 4), "timestep": TIMES / 1000, "img_shapes": [[(1, 4, 4)]], **SEEN}
        | {"encoder_hidden_states_mask": torch.ones(ROWS, 5)},
    ),
    "Transformer2DModel": (
        {**HEADS, "in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": 16},
        {"hidden_states": values(16, 8, 8), **SEEN},
    ),
    "UVit2DModel": (
        {"hidden_size": 16, "cond_embed_dim": 16, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20}
        | {
            "encoder_hidden_size": 16,
            "vocab_size": 16,
            "codebook_size": 12,
            "in_channels": 16,
            "block_out_channels": 16,
        }
        | {"num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 3, "num_attention_heads": 2}
        | {"intermediate_size": 32},
        {"input_ids": torch.arange(ROWS * 64).reshape(ROWS, 8, 8) % 12, "pooled_text_emb": values(16)}
        | {"micro_conds": values(5), **SEEN},
    ),
}


def case(name: str) -> Case:
    settings, inputs = KINDS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**settings).train()
    with torch.no_grad():  # some parts begin with zeros, and would hide what comes before them
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    for module in model.modules():
        for attribute in ("p", "dropout_prob"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    whole = {key: Replicate() for key in WHOLE if key in inputs}
    return Case(model, Arguments((), inputs), of_all_rows, 1e-3, in_spec=whole or None)


def names() -> list[str]:
    return [*KINDS]
