"""A packed row is split between documents: outputs, loss and gradients match the full row."""

import copy
import logging
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, Packed
from microbatch import Replicate

from ..layers import MODES, gradients
from .losses import CLASSES, IGNORED

WIDTH = 4


class Attention(nn.Module):
    """Each token attends to the previous tokens of its document."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        keys, values = self.both(hidden).chunk(2, -1)
        scores = (hidden @ keys.mT).masked_fill(~mask, float("-inf"))
        return hidden + self.out(scores.softmax(-1) @ values)


class Model(nn.Module):
    """Keeps documents apart by ``position_ids``, or by their cumulative lengths. The sizes of its calls are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(99, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        ends: Tensor | None = None,
        num_items_in_batch: Any = None,
        attention_mask: Any = None,
        longest: int = 0,
        bias: Tensor | None = None,
    ) -> dict[str, Any]:
        if ends is None:
            document = F.pad((position_ids.diff() != 1).cumsum(-1), (1, 0))
        else:
            document = torch.bucketize(torch.arange(position_ids.shape[1]), ends[1:], right=True)[None]
        causal = torch.ones(2 * input_ids.shape[1:], dtype=torch.bool).tril()
        mask = (document[:, :, None] == document[:, None]) & causal
        hidden = self.embed(input_ids) + self.places(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits = self.head(hidden) if bias is None else self.head(hidden) + bias
        if labels is None:
            return {"logits": logits}
        words, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": F.cross_entropy(words, labels, reduction="sum") / count, "logits": logits}


def batch(lengths: Sequence[int], seed: int = 0, *, ends: bool = False, counts: bool = False) -> dict[str, Tensor]:
    """Return a packed row; the first label of each document is ignored unless ``counts``."""
    words = torch.randint(CLASSES, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = words if counts else words.where(positions > 0, IGNORED)
    more = {"ends": torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)} if ends else {}
    return {"input_ids": words, "position_ids": positions, "labels": labels, **more}


def made(chunks: int = 3, mode: str = "never") -> tuple[GPipe, Model]:
    torch.manual_seed(0)
    plain = Model()
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=chunks, checkpoint=mode, in_spec=Packed())
    return pipe, plain


def expect_the_same(pipe: GPipe, plain: Model, inputs: dict[str, Any], **options: Any) -> list[int]:
    """Compare a step and an output with the plain model. Return the tokens per micro-batch of a step."""
    expected, tokens = plain(**inputs), list[int]()
    plain.zero_grad()
    expected["loss"].backward()
    hook = pipe[:].layers[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[1]))
    pipe.zero_grad()
    found = pipe.step(**inputs, **options)
    hook.remove()
    torch.testing.assert_close(found, expected["loss"].detach())
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    torch.testing.assert_close(pipe.evaluate(**inputs), expected["loss"].detach())
    pipe.zero_grad()
    output = pipe(**inputs)
    output["loss"].backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    return tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("items", [None, 13])
@pytest.mark.parametrize("ends", [False, True])
def test_it_is_the_row_of_the_plain_model(ends: bool, items: int | None, mode: str) -> None:
    pipe, plain = made(mode=mode)
    with closing(pipe):
        for k, lengths in enumerate([[4, 2, 3, 5, 1, 3], [3, 3, 3], [1, 7, 2, 2]]):
            inputs: dict[str, Any] = batch(lengths, k, ends=ends)
            if items is not None:
                inputs["num_items_in_batch"] = items
            tokens = expect_the_same(pipe, plain, inputs)
            assert {*tokens} == [{4, 6, 8}, {3}, {1, 4, 7}][k]
            assert pipe.last_schedule is not None
            assert pipe.last_schedule.name == ("1f1b" if k else "fill_drain")


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9), chunks=st.integers(1, 5))
def test_any_documents_in_any_number_of_micro_batches(lengths: list[int], chunks: int) -> None:
    pipe, plain = made(chunks)
    with closing(pipe):
        inputs = batch([*lengths, 2])
        tokens = expect_the_same(pipe, plain, inputs)
        assert sum(tokens) == sum(lengths) + 2
        assert len(tokens) == min(chunks, len(lengths) + 1)


def test_labels_across_documents_keep_full_row_loss() -> None:
    pipe, plain = made()
    with closing(pipe):
        for _ in range(2):
            expect_the_same(pipe, plain, batch([4, 2, 3, 5], counts=True))
            assert pipe.last_schedule is not None
            assert pipe.last_schedule.name == "fill_drain"
        with pytest.raises(ValueError, match="it is not known how the losses of micro-batches add up"):
            pipe.step(**batch([4, 2, 3, 5], counts=True), schedule="1f1b")
        expect_the_same(pipe, plain, batch([4, 2, 3, 5]), schedule="1f1b")


def test_several_rows_are_cut_by_rows() -> None:
    pipe, plain = made()
    rows = [batch(lengths) for lengths in ([4, 2, 3], [1, 8], [9])]
    with closing(pipe):
        tokens = expect_the_same(pipe, plain, {name: torch.cat([row[name] for row in rows]) for name in rows[0]})
        assert tokens == [9, 9, 9]


def test_loss_function_gets_output_of_full_row() -> None:
    pipe, plain = made()
    inputs = batch([4, 2, 3, 5])
    with closing(pipe):
        expected = plain(**inputs)["logits"].square().mean()
        expected.backward()
        found = pipe.step(**inputs, loss_fn=lambda output: output["logits"].square().mean())
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(gradients(pipe), gradients(plain))
        with pytest.raises(ValueError, match=r"a mean over rows, but Packed\(\) splits a single row"):
            pipe.step(**inputs, reduction="mean")


def test_tensor_outside_the_row_needs_a_spec() -> None:
    pipe, plain = made()
    inputs, bias = batch([4, 2, 3, 5]), torch.randn(CLASSES, dtype=torch.float64)
    with closing(pipe):
        with pytest.raises(ValueError, match=r"kwargs\['bias'\] has shape \(7,\); expected \(1, tokens, \.\.\.\)"):
            pipe.step(**inputs, bias=bias)
        loss = pipe.step(**inputs, bias=Replicate(bias))
        torch.testing.assert_close(loss, plain(**inputs, bias=bias)["loss"].detach())


def test_mask_across_documents_raises() -> None:
    pipe, _ = made()
    inputs = batch([4, 2, 3, 5])
    ones = torch.ones_like(inputs["input_ids"])
    with closing(pipe), pytest.raises(ValueError, match="attention_mask has the same value for all documents"):
        pipe.step(**inputs, attention_mask=ones)


def test_positions_without_a_dimension_of_tokens_are_refused() -> None:
    pipe, _ = made()
    inputs = batch([4, 2, 3, 5])
    with closing(pipe), pytest.raises(ValueError, match=r"of shape \(1, tokens\); got \(3, 1, 14\)"):
        pipe.step(**{**inputs, "position_ids": inputs["position_ids"].expand(3, 1, 14)})


@pytest.mark.parametrize("in_spec", [None, Packed()])
@pytest.mark.parametrize("method", ["step", "call"])
def test_unsplit_row_is_logged_once(method: str, in_spec: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipe = GPipe(Model(), devices=["cpu"] * 2, chunks=3, in_spec=in_spec)
    with closing(pipe), caplog.at_level(logging.WARNING, "gpipe"):
        for _ in range(2):
            pipe.step(**batch([4, 2, 3])) if method == "step" else pipe(**batch([4, 2, 3]))
    found = [record.message for record in caplog.records if "nothing overlaps" in record.message]
    assert len(found) == (in_spec is None)
    assert all("in_spec=gpipe.Packed()" in message for message in found)


class Mixing(Model):
    """Its tokens attend to other documents too."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, **others: Any) -> dict[str, Any]:
        return super().forward(input_ids, torch.arange(position_ids.shape[1])[None], **others)


@pytest.mark.parametrize("kind", [Model, Mixing])
def test_unsplit_evaluation_shows_whether_documents_are_independent(kind: type[Model]) -> None:
    torch.manual_seed(0)
    with closing(GPipe(kind(), devices=["cpu"] * 2, chunks=3, in_spec=Packed())) as pipe:
        cut = pipe.evaluate(**batch([4, 2, 3, 5]))
        pipe.chunks = 1
        assert torch.allclose(cut, pipe.evaluate(**batch([4, 2, 3, 5]))) == (kind is Model)
