"""Every model of transformers that computes a loss of tokens, made small: equal to the plain model, or refused.

A class that the settings below do not make small, or that fails by itself on the batch, is skipped.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import transformers

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
ROWS, LENGTH, LABELS, WORDS = 6, 12, 3, 96
SETTINGS = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim proj_size moe_intermediate_size",
    64: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner max_position_embeddings n_positions",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads num_experts "
    "encoder_attention_heads decoder_attention_heads num_local_experts n_routed_experts conv_kernel",
    2: "encoder_layers decoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok eos_token_id",
    8: "d_kv head_dim rotary_dim sliding_window state_size ssm_state_size qk_rope_head_dim qk_nope_head_dim v_head_dim",
    16: "q_lora_rank kv_lora_rank",
    1: "bos_token_id n_group topk_group first_k_dense_replace",
    WORDS: "vocab_size",
}
LOSSES = {
    "words": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "answer": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "class": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "span": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


def classes() -> dict[str, str]:
    """The loss of each class, by its name."""
    found: dict[str, str] = {}
    for loss, mapping in LOSSES.items():
        for names in getattr(transformers.models.auto.modeling_auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, loss)
    return {name: loss for name, loss in found.items() if hasattr(transformers, name)}


def small(kind: Any, loss: str) -> nn.Module:
    config = kind.config_class()
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    config.num_labels = 2 if loss == "span" else LABELS
    for value, names in SETTINGS.items():
        for name in names.split():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        if name.endswith("layer_types") and isinstance(value, list):
            setattr(config, name, value[:4])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > 30_000_000:
        pytest.skip("the settings do not make it small")
    torch.manual_seed(0)
    return kind(config).train()


def batch(loss: str) -> dict[str, Tensor]:
    """Rows of several lengths, of which the later ones have few labels."""
    torch.manual_seed(3)
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH))
    ends = LENGTH - torch.arange(ROWS)[:, None]
    mask = torch.arange(LENGTH) < ends
    tokens.scatter_(1, ends - 1, 2)  # the end of a text
    inputs = {"input_ids": tokens * mask, "attention_mask": mask.long()}
    few = mask & ((torch.arange(ROWS)[:, None] < 3) | (torch.arange(LENGTH) < 3))
    if loss == "class":
        return {**inputs, "labels": torch.randint(LABELS, (ROWS,))}
    if loss == "span":
        return {**inputs, "start_positions": torch.arange(ROWS), "end_positions": torch.arange(1, ROWS + 1)}
    words = torch.randint(LABELS, tokens.shape) if loss == "tokens" else tokens
    return {**inputs, "labels": words.masked_fill(~few, -100)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def expect_close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected.detach(), rtol=1e-4, atol=1e-4)


def step(pipe: GPipe, inputs: dict[str, Tensor]) -> Tensor:
    return pipe.step(**inputs)


def call(pipe: GPipe, inputs: dict[str, Tensor]) -> Tensor:
    loss = pipe(**inputs).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("name", classes())
def test_equal_or_refused(name: str) -> None:
    inputs = batch(classes()[name])
    try:
        model = small(getattr(transformers, name), classes()[name])
        plain = copy.deepcopy(model)
        expected = plain(**inputs).loss
        expect_close(copy.deepcopy(model)(**inputs).loss, expected)
        expected.backward()
    except Exception as error:
        pytest.skip(f"not by these settings: {error!r:.200}")
    wanted = gradients(plain)
    if not expected.isfinite():
        pytest.skip("its loss is not finite")
    try:
        pipe = GPipe(model, devices=["cpu", "cpu"], chunks=3, sample={key: rows[:2] for key, rows in inputs.items()})
    except (AttributeError, TypeError, ValueError) as refusal:
        pytest.xfail(f"refused: {refusal!s:.300}")
    largest = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient.numel())
    for way in (step, call):
        try:
            loss = way(pipe, inputs)
        except (AttributeError, TypeError, ValueError, RuntimeError) as refusal:
            pytest.xfail(f"refused by {way.__name__}: {refusal!s:.300}")
        expect_close(loss, expected)
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key] / largest, gradient / largest, rtol=0, atol=1e-3)
    pipe.eval()
    expect_close(pipe.evaluate(**inputs), plain.eval()(**inputs).loss)
    pipe.close()
