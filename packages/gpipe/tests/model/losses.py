"""Helpers for losses computed by models: labels, a pipe and its plain model, comparisons."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gpipe import GPipe

IGNORED, CLASSES = -100, 7
Loss = Callable[..., Tensor]
M = TypeVar("M", bound=nn.Module)


def labelled(count: int, length: int, kept: int, sure: int) -> dict[str, Tensor]:
    """Return labels. ``kept`` of the first row are counted, fewer in each further row, and none in some.

    The first ``sure`` are always counted, as the plain model would have no loss without any.
    """
    generator = torch.Generator().manual_seed(count)
    found = torch.randint(CLASSES, (2, count, length), generator=generator)
    labels = found[1].clone()
    for k, row in enumerate(labels):
        row[max(0, kept - k) :] = IGNORED
    labels[0, :sure] = found[1, 0, :sure]
    return {"tokens": found[0], "labels": labels, "ends": found[1, :, 0]}


@cache
def both(loss: Loss, kind: Callable[[Loss], M]) -> tuple[GPipe, M]:
    torch.manual_seed(0)
    plain = kind(loss)
    return GPipe(copy.deepcopy(plain), devices=["cpu"] * 2), plain


def assert_same(pipe: GPipe, plain: nn.Module, inputs: dict[str, Any], schedule: str | None = None) -> None:
    """``evaluate`` and ``step`` give the loss and the gradients of the plain model."""
    expected = plain(**inputs)["loss"]
    for model in (pipe, plain):
        model.zero_grad()
    expected.backward()
    for found in (pipe.evaluate(**inputs), pipe.step(**inputs, schedule=schedule)):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    assert_same_gradients(pipe, plain)


def assert_same_gradients(pipe: GPipe, plain: nn.Module) -> None:
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, equal_nan=True)
