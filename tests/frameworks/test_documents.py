"""Rows of several documents, as data collators of transformers make them, are cut between documents."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import GPipe, Packed

from .families import transformers
from .pipelined import pipelined

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
WORDS = 64


def made(kind: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, vocab_size=WORDS, use_cache=False, attn_implementation=attention, num_key_value_heads=2, head_dim=4
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()  # type: ignore[no-any-return]


def texts(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(WORDS, (length,), generator=generator).tolist()} for length in lengths]


KINDS = [("Llama", "eager"), ("Llama", "sdpa"), ("Qwen3", "sdpa"), ("Gemma2", "eager"), ("Mistral", "sdpa")]


@pytest.mark.parametrize("lengths", [False, True], ids=["positions", "cumulative lengths"])
@pytest.mark.parametrize(("kind", "attention"), KINDS)
def test_steps_are_those_of_the_plain_model(kind: str, attention: str, lengths: bool) -> None:
    plain = made(kind, attention)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu", "cpu"], chunks=3, in_spec=Packed())
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    for seed in range(2):
        batch = collate(texts(7, seed))
        plain.zero_grad()
        plain(**batch).loss.backward()
        for steps in (True, False):
            pipe.zero_grad()
            with pipelined(pipe, 1, microbatches=3):
                pipe.step(**batch) if steps else pipe(**batch).loss.backward()
            for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    pipe.close()


def trained(model: nn.Module, folder: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=6, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0, gradient_accumulation_steps=2,
    )  # fmt: skip
    collate: Any = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    data = texts(36)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path: Path) -> None:
    plain = made("Llama", "sdpa")
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu", "cpu"], chunks=3, in_spec=Packed())
    with pipelined(pipe, 1, microbatches=3):
        found = trained(pipe, tmp_path)
    assert found == pytest.approx(trained(plain, tmp_path), rel=1e-5)
    assert len(found) == 3


def test_several_rows_with_documents_are_cut_by_rows() -> None:
    plain = made("Llama", "sdpa")
    words = torch.randint(WORDS, (6, 8), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]]).repeat(3, 1)
    labels = words.where(positions > 0, -100)
    batch = {"input_ids": words, "position_ids": positions, "labels": labels}
    plain(**batch).loss.backward()
    for in_spec in (None, Packed()):
        pipe = GPipe(copy.deepcopy(plain), devices=["cpu", "cpu"], chunks=3, in_spec=in_spec)
        for _ in range(2):
            pipe.zero_grad()
            with pipelined(pipe, 2, microbatches=3):
                pipe.step(**batch)
            for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        pipe.close()
