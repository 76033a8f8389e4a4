"""Lists with one entry per row, such as the boxes of each picture, are split by entry."""

import copy
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from microbatch import Entries, Replicate, Split

from ..layers import MODES, assert_same, rows
from .residuals import Residuals, plain_of


@dataclass
class Boxes:
    corners: Tensor


def of_dicts(count: int, k: int) -> Any:
    return {"corners": rows(count), "id": k}


def of_objects(count: int, k: int) -> Any:
    return Boxes(rows(count))


def of_tensors(count: int, k: int) -> Any:
    return rows(count)


KINDS = [of_dicts, of_objects, of_tensors]


def corners(label: Any) -> Tensor:
    found: Tensor = (
        label if isinstance(label, Tensor) else label["corners"] if isinstance(label, dict) else label.corners
    )
    return found


class Detector(Residuals):
    """The loss is a sum over boxes, divided by the number of all boxes."""

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        output = super().forward(x)
        if labels is None:
            return output
        assert len(labels) == len(x)
        count = max(1, sum(len(corners(label)) for label in labels))
        losses = [(corners(label) - row).square().sum() for label, row in zip(labels, output, strict=True)]
        return {"loss": sum(losses) / count + output.square().mean(), "output": output}


def detector() -> Detector:
    return Detector(*(nn.Linear(3, 3) for _ in range(4)))


def is_plain(counts: list[int]) -> bool:
    """Return whether the sizes show that the list's tensors are not batched."""
    return len(counts) == 1 or any(count % len(counts) for count in counts)


sizes = st.lists(st.integers(0, 4), min_size=1, max_size=7)


@given(sizes, st.sampled_from(KINDS), st.integers(1, 4), st.sampled_from(MODES), st.booleans())
def test_full_batch_loss_with_entries_matches_model(
    counts: list[int], kind: Any, chunks: int, mode: str, says: bool
) -> None:
    assume(says or is_plain(counts))
    x, labels = rows(len(counts)), [kind(count, k) for k, count in enumerate(counts)]
    given_spec = {"labels": Entries()} if says else None
    with closing(GPipe(detector(), devices=["cpu"] * 2, chunks=chunks, checkpoint=mode, in_spec=given_spec)) as pipe:
        plain = plain_of(pipe)
        for _ in range(2):
            plain.zero_grad()
            pipe.zero_grad()
            expected = plain(x, labels)
            expected["loss"].backward()
            torch.testing.assert_close(pipe.step(x=x, labels=labels), expected["loss"].detach())
            assert_same(pipe, plain)
            torch.testing.assert_close(pipe(x=x, labels=labels), expected)
            if not says:
                torch.testing.assert_close(pipe(x, labels), expected)
                torch.testing.assert_close(pipe(x, Entries(labels)), expected)
            torch.testing.assert_close(pipe.evaluate(x=x, labels=labels), expected["loss"].detach())


@given(sizes, st.sampled_from(KINDS), st.integers(1, 4))
def test_micro_batch_losses_with_entries_match_loop(counts: list[int], kind: Any, chunks: int) -> None:
    assume(is_plain(counts))
    x, labels = rows(len(counts)), [kind(count, k) for k, count in enumerate(counts)]
    with closing(GPipe(detector(), devices=["cpu"] * 2, chunks=chunks)) as pipe:
        plain = plain_of(pipe)
        at, total = 0, torch.zeros((), dtype=x.dtype)
        for part in x.chunk(chunks):
            share = len(part) / len(x)
            total = total + plain(part, labels[at : at + len(part)])["loss"] * share
            at += len(part)
        total.backward()
        torch.testing.assert_close(pipe.step(x=x, labels=labels, reduction="mean", schedule="1f1b"), total.detach())
        assert_same(pipe, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[2, 2], [4, 0], [3, 6, 0]])
def test_ambiguous_list_raises(kind: Any, counts: list[int]) -> None:
    x, labels = rows(len(counts)), [kind(count, k) for k, count in enumerate(counts)]
    with closing(GPipe(detector(), devices=["cpu"] * 2, chunks=2)) as pipe:
        for use in (pipe.step, pipe.evaluate, pipe):
            with pytest.raises(ValueError, match=r"the keyword 'labels' is a list of \d, as many.*Entries"):
                use(x=x, labels=labels)


class Levels(Residuals):
    """Takes more batched tensors."""

    def forward(self, x: Tensor, levels: Any) -> Tensor:
        return super().forward(x) + sum(level for pair in levels for level in pair)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_lists_of_batched_tensors_are_split_inside(number: int) -> None:
    model = Levels(*(nn.Linear(3, 3) for _ in range(2)))
    plain = copy.deepcopy(model)
    pairs = tuple((rows(2), rows(2)) for _ in range(number))
    with torch.no_grad(), closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for levels in (pairs, [*pairs]):
            torch.testing.assert_close(pipe(rows(2), levels=levels), plain(rows(2), levels))


@pytest.mark.parametrize("rule", [Split(0), Replicate()])
def test_in_spec_may_disable_splitting_by_entry(rule: Any) -> None:
    class Model(Residuals):
        def forward(self, x: Tensor, levels: Any) -> Tensor:
            return super().forward(x) + sum(level["x"].mean() for level in levels)

    model = Model(*(nn.Linear(3, 3) for _ in range(2)))
    levels = [{"x": torch.ones(2, 3, dtype=torch.float64)} for _ in range(2)]
    expected = copy.deepcopy(model)(rows(2), levels)
    with torch.no_grad(), closing(GPipe(model, devices=["cpu"] * 2, chunks=2, in_spec={"levels": rule})) as pipe:
        torch.testing.assert_close(pipe(x=rows(2), levels=levels), expected)
