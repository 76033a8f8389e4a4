"""Models of pictures and words: the loss and gradients of the plain model, or an error, as the page says."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from microbatch import Split

from .families import DECODER, VISION, transformers
from .table import PAGE, distance, gradients

PICTURE, START = 5, 62
TEXT = {**DECODER, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 256}
SEEING = {**VISION, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
TOKENS = {"image_token_id": PICTURE, "vision_start_token_id": START, "video_token_id": 61, "vision_end_token_id": 63}
PATCHES = {"depth": 2, "num_heads": 4, "patch_size": 4, "in_channels": 3, "spatial_merge_size": 2}
IDEFICS = {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SEEING}
IDEFICS |= {"image_token_id": PICTURE, "scale_factor": 2}
OTHERS = [1, 2, 1, 0, 1, 1]
HEAD = "| pictures and words |"

# The name in transformers, its configuration, and how many tokens a picture has.
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "LLaVA": (
        "Llava",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **SEEING}}
        | {"image_token_index": PICTURE, "vision_feature_layer": -1},
        16,
    ),
    "PaliGemma": (
        "PaliGemma",
        {"text_config": {"model_type": "gemma", "head_dim": 8, **TEXT}, "image_token_index": PICTURE}
        | {"vision_config": {"model_type": "siglip_vision_model", "projection_dim": 32, **SEEING}}
        | {"projection_dim": 32},
        16,
    ),
    "Gemma 3": (
        "Gemma3",
        {"text_config": {"head_dim": 8, "sliding_window": 8, **TEXT}, "vision_config": SEEING}
        | {"image_token_index": PICTURE, "mm_tokens_per_image": 4},
        4,
    ),
    "Qwen2-VL": (
        "Qwen2VL",
        {"text_config": {**TEXT, "rope_parameters": ROPE}, **TOKENS}
        | {"vision_config": {**PATCHES, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}},
        4,
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VL",
        {"text_config": {**TEXT, "rope_parameters": ROPE}, **TOKENS}
        | {"vision_config": {**PATCHES, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64}},
        4,
    ),
    "Idefics3": ("Idefics3", IDEFICS, 4),
    "SmolVLM": ("SmolVLM", IDEFICS, 4),
}


def made(name: str) -> nn.Module:
    kind, settings, _ = KINDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).train()


def batch(name: str, pictures: list[int]) -> dict[str, Tensor]:
    """Return one row per entry of ``pictures``, with that number of pictures; the first is padded."""
    rows, total, tokens = len(pictures), sum(pictures), KINDS[name][2]
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(6, 60, (rows, 40), generator=generator)
    for row, number in zip(ids, pictures, strict=True):
        for k in range(number):
            row[k * (tokens + 1)] = START
            row[k * (tokens + 1) + 1 : (k + 1) * (tokens + 1)] = PICTURE
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    found["labels"] = ids.masked_fill((mask == 0) | (ids == PICTURE), -100)
    if name.startswith("Qwen"):
        grids = torch.tensor([[1, 4, 4]]).expand(total, 3)
        pixels = torch.randn(16 * total, 96, generator=generator)
        return {**found, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == PICTURE).long()}
    if name in ("Idefics3", "SmolVLM"):  # they pad, with pictures of zeros
        pixels = torch.randn(rows, max(pictures), 3, 16, 16, generator=generator)
        there = torch.arange(max(pictures)) < torch.tensor(pictures)[:, None]
        return {**found, "pixel_values": pixels * there[..., None, None, None]}
    kinds = {"PaliGemma": ids != PICTURE, "Gemma 3": ids == PICTURE}
    found |= {"token_type_ids": kinds[name].long()} if name in kinds else {}
    return {**found, "pixel_values": torch.randn(total, 3, 16, 16, generator=generator)}


def rules(name: str) -> dict[str, Split] | None:
    """Return rules that split picture inputs by the tokens of each text; None if each text has one picture."""
    if name in ("Idefics3", "SmolVLM"):
        return None
    tokens = KINDS[name][2]
    pictures = Split(counts=lambda batch: (batch["input_ids"] == PICTURE).sum(1) // tokens)
    if not name.startswith("Qwen"):
        return {"pixel_values": pictures}
    patches = Split(counts=lambda batch: (batch["input_ids"] == PICTURE).sum(1) * 4)
    return {"pixel_values": patches, "image_grid_thw": pictures}


def measured(pipe: GPipe, model: nn.Module, given: dict[str, Tensor]) -> str:
    """Return the outcome of a batch, after checking that loss and gradients are never wrong."""
    plain = copy.deepcopy(model)
    expected = plain(**given).loss
    expected.backward()
    try:
        whole = pipe(**given).loss
        whole.backward()
        called = gradients(model)
        model.zero_grad()
        count = (given["labels"][:, 1:] != -100).sum()
        losses = [whole, pipe.step(**given), pipe.evaluate(**given, num_items_in_batch=count)]
    except (ValueError, RuntimeError):
        return "refused"
    for loss in losses:
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    for found in (called, gradients(model)):
        assert distance(found, gradients(plain)) < 1e-4
    model.zero_grad()
    return "equal"


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: others for name, *others in cells}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", KINDS)
def test_multimodal_batch_matches_page(name: str) -> None:
    """Batches have equal numbers of pictures per micro-batch, different ones with and without rules, or none in one."""
    model = made(name)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=3, checkpoint="never")
    found = [measured(pipe, model, batch(name, pictures)) for pictures in ([2, 1, 1, 2, 1, 2], OTHERS)]
    pipe.in_spec = rules(name)
    found += [measured(pipe, model, batch(name, pictures)) for pictures in (OTHERS, [0, 1, 2, 0, 0, 0])]
    assert found == rows()[name]
