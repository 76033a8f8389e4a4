"""A model that computes its own loss gives its whole output through a pipe: the loss of the whole mini-batch."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, flatten, inline

IGNORED = -100
DOUBLE = torch.float64


class Trunk(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=DOUBLE)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=DOUBLE) for _ in range(blocks))
        self.norm = nn.LayerNorm(4, dtype=DOUBLE)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        hidden = embedded = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return {"hidden": self.norm(hidden), "embedded": embedded, "cache": None}


class Model(nn.Module):
    """Its loss is a mean over what is not ignored, or divided by what the caller counted."""

    def __init__(self, blocks: int = 3, cap: float = 2.0) -> None:
        super().__init__()
        self.trunk = Trunk(blocks)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(4, 7, dtype=DOUBLE)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED, reduction="none")
        self.cap = cap

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Any]:
        logits = self.head(self.dropout(self.trunk(tokens)["hidden"]))
        logits = (logits / self.cap).tanh() * self.cap
        if labels is None:
            return {"logits": logits}
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.loss(logits.flatten(0, 1), labels.flatten()).sum() / count, "logits": logits}


def model_of(blocks: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(blocks)


def batch(rows: int, length: int = 5, padded: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(7, (rows, length), generator=torch.Generator().manual_seed(rows))
    labels = tokens.flip(1).clone()
    if padded:  # ever fewer labels count, down to one in a row
        for k, row in enumerate(labels):
            row[1 + k % length :] = IGNORED
    return {"tokens": tokens, "labels": labels}


def pipe_of(model: nn.Module, cut: int, **options: Any) -> GPipe:
    layers = flatten(model, batch(2))
    sizes = [cut, len(layers) - cut]
    return GPipe(layers, sizes, devices=["cpu"] * 2, **options)


def assert_same(pipe: nn.Module, plain: nn.Module, inputs: dict[str, Any]) -> None:
    found, expected = pipe(**inputs), plain(**inputs)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)
    if "loss" not in expected:
        return
    for output in (found, expected):
        (output["loss"] * 2 + output["logits"].square().mean()).backward()
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


@cache
def both(cut: int) -> tuple[GPipe, Model]:
    model = model_of()
    return pipe_of(copy.deepcopy(model), cut), model


@settings(max_examples=settings.default.max_examples // 2)
@given(
    rows=st.integers(1, 7),
    length=st.integers(1, 6),
    chunks=st.integers(1, 8),
    cut=st.integers(1, 4),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    counted=st.booleans(),
    threads=st.booleans(),
)
def test_the_output_is_that_of_the_model(
    rows: int, length: int, chunks: int, cut: int, checkpoint: str, counted: bool, threads: bool
) -> None:
    pipe, plain = both(cut)
    pipe.chunks, pipe.checkpoint = chunks, checkpoint
    inputs: dict[str, Any] = batch(rows, length)
    if counted:
        inputs["num_items_in_batch"] = torch.tensor(11)
    with nullcontext() if threads else inline():
        assert_same(pipe, plain, inputs)
    pipe.zero_grad()
    plain.zero_grad()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_have_it(again: Any) -> None:
    model = model_of()
    plain = copy.deepcopy(model)
    assert_same(again(pipe_of(model, 2, chunks=3)), plain, batch(5))


def test_threads_may_call_it_at_once() -> None:
    model = model_of().eval()
    pipe = pipe_of(model, 2, chunks=2)
    expected = {rows: model(**batch(rows))["loss"].detach() for rows in range(1, 9)}
    found: dict[int, Tensor] = {}

    def call(rows: int) -> None:
        with torch.no_grad():
            found[rows] = pipe(**batch(rows))["loss"]

    threads = [threading.Thread(target=call, args=(rows,)) for rows in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_run_is_held(fails: bool) -> None:
    pipe = pipe_of(model_of(), 2, chunks=3)
    inputs = batch(5)
    if fails:
        with pytest.raises(ValueError, match="batch_size"):
            pipe(inputs["tokens"], inputs["labels"][:, :3])
    found = pipe(**inputs)
    held = [weakref.ref(tensor) for tensor in (found["logits"], found["loss"])]
    del found
    assert [each() for each in held] == [None, None]


class Tells(Model):
    """Returns what the first stage computed, which the last one does not have."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        trunk = self.trunk(tokens)
        logits = self.head(trunk["hidden"])
        loss = self.loss(logits.flatten(0, 1), tokens.flatten()).mean()
        return {"loss": loss, "logits": logits, "embedded": trunk["embedded"]}


def test_fields_that_cannot_be_told_are_left_out() -> None:
    torch.manual_seed(0)
    model = Tells()
    plain = copy.deepcopy(model)
    found = pipe_of(model, 2, chunks=2)(**batch(4))
    assert found.keys() == {"loss", "logits"}
    torch.testing.assert_close(found["loss"], plain(**batch(4))["loss"])


def test_backward_hooks_on_what_the_loss_is_computed_from_are_refused() -> None:
    model = model_of()
    pipe = pipe_of(model, 2, chunks=2)
    model.head.register_full_backward_hook(lambda module, given, grown: None)
    with pytest.raises(RuntimeError, match="'head' has backward hooks"):
        pipe(**batch(4))
