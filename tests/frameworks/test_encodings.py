"""What tokenizers and feature extractors return: mappings that are cut into micro-batches and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="transformers is not installed; see nox -s frameworks")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BatchEncoding, PreTrainedTokenizerFast

from gpipe import GPipe, flatten
from microbatch import check, gather, scatter

from .families import FAMILIES

WORDS = ["a", "b", "c"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


sentences = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)


@given(st.lists(sentences, min_size=1, max_size=8), st.integers(1, 9))
def test_what_a_tokenizer_returns_is_gathered_as_it_was(texts: list[str], chunks: int) -> None:
    encoding = tokenizer()(texts, padding=True, return_tensors="pt")
    check(encoding)
    batches = scatter(encoding, chunks)
    rows = [len(part) for part in torch.ones(len(texts)).chunk(chunks)]
    assert [len(batch.value.input_ids) for batch in batches] == rows
    assert_same(gather(batches), encoding)


def test_a_pipeline_takes_what_a_tokenizer_returns() -> None:
    model = FAMILIES["GPT-2"].make().eval()
    encoding = tokenizer()(["a b c", "b", "c a", "a"], padding=True, return_tensors="pt")
    inputs = {name: encoding[name] for name in ("input_ids", "attention_mask")}
    layers = flatten(model, inputs)
    pipe = GPipe(layers, [1, len(layers) - 1], devices=["cpu", "cpu"], chunks=2).eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe(**BatchEncoding(inputs)), model(**inputs)["logits"])
