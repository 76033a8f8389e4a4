"""``step`` and ``evaluate`` are called as the first layer is: with keywords, or one value, which may be a mapping."""

from collections import UserDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import Arguments

from ..layers import assert_same, linears, piped, rows
from ..schedules import ALONE


class Several(nn.Module):
    """A layer with keyword arguments."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, shift: Tensor | None = None) -> Any:
        x = x if mask is None else x * mask
        return x * scale if shift is None else x * scale + shift


class Whole(nn.Module):
    """Takes a mapping."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] * batch.get("mask", 1)


def model(first: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, *linears())


def loss_fn(output: Tensor) -> Tensor:
    return output.square().mean()


masks = st.sampled_from([rows().abs(), rows()[:, :1].abs()])
keywords = st.fixed_dictionaries(
    {"x": st.just(rows())}, optional={"mask": masks, "scale": st.sampled_from([2, 0.5]), "shift": masks}
)


CALLS: list[Callable[[Callable[..., Any], dict[str, Any]], Any]] = [
    lambda method, batch: method(**batch, loss_fn=loss_fn, reduction="mean"),
    lambda method, batch: method(**UserDict(batch), loss_fn=loss_fn, reduction="mean"),
    lambda method, batch: method(Arguments((), batch), loss_fn=loss_fn, reduction="mean"),
    lambda method, batch: method(batch["x"], **without_x(batch), loss_fn=loss_fn, reduction="mean"),
    lambda method, batch: method(Arguments((batch["x"],), {}), **without_x(batch), loss_fn=loss_fn, reduction="mean"),
]


def without_x(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "x"}


@given(keywords, st.sampled_from(CALLS), st.integers(1, 7), st.sampled_from(ALONE), st.booleans())
def test_keywords_train_like_the_model(
    batch: dict[str, Any], call: Callable[..., Any], chunks: int, schedule: str, inline: bool
):
    plain = model(Several())
    expected = loss_fn(plain[1:](plain[0](**batch)))
    expected.backward()
    pipe = piped(plain, [2, 2], chunks=chunks)
    with gpipe.inline() if inline else closing(pipe):
        torch.testing.assert_close(call(pipe.evaluate, batch), expected.detach())
        torch.testing.assert_close(call(partial(pipe.step, schedule=schedule), batch), expected.detach())
        assert_same(pipe, plain)


class Mean(nn.Module):
    """Takes a mapping, and keywords that may have the names of its keys."""

    def forward(self, batch: Any, x: Any = None, **options: Any) -> Tensor:
        assert x is None
        assert not options
        return batch["x"] * batch.get("mask", 1)


class Anything(nn.Module):
    def forward(self, **batch: Tensor) -> Tensor:
        return batch["x"] + batch["y"]


X, Y = rows(), rows().abs()


@given(
    st.sampled_from([Whole, Mean]), st.sampled_from([dict, UserDict]), st.booleans(), st.integers(1, 7), st.booleans()
)
def test_a_mapping_is_one_argument(
    layer: type[nn.Module], kind: Callable[[Any], Any], masked: bool, chunks: int, inline: bool
):
    """The names of its keys, and of the layer's arguments, do not matter."""
    plain, batch = model(layer()), {"x": X, "mask": Y} if masked else {"x": X}
    expected = F.mse_loss(plain(batch), Y)
    expected.backward()
    pipe = piped(plain, [2, 2], chunks=chunks)
    with gpipe.inline() if inline else closing(pipe):
        torch.testing.assert_close(pipe(kind(batch)), plain(batch))
        torch.testing.assert_close(pipe.evaluate(kind(batch), Y, loss_fn=F.mse_loss), expected.detach())
        torch.testing.assert_close(pipe.step(kind(batch), Y, loss_fn=F.mse_loss), expected.detach())
        assert_same(pipe, plain)


class Clashing(nn.Module):
    """Has parameters with names of step's parameters."""

    def forward(self, x: Tensor, target: Any = None, reduction: str = "none", input: Any = 0.0) -> Tensor:  # noqa: A002
        return x + input if target is None else x + target


@pytest.mark.parametrize(
    ("layer", "call", "message"),
    [
        (
            Clashing,
            {"x": X, "target": Y},
            r"Clashing\.forward.*'reduction', 'target' could also be an argument of step",
        ),
        (Several, {"x": X, "labels": Y}, r"do not fit: got an unexpected keyword argument 'labels'"),
        (Several, {"mask": Y}, r"do not fit: missing a required argument: 'x'"),
        (Anything, {"x": X, "y": Y, "losss_fn": 3}, r"'losss_fn' is not a keyword of step\(\); did you mean 'loss_fn'"),
        (Anything, {"x": X, "y": Y, "schedul": 3}, "did you mean 'schedule'"),
        (Several, {}, r"step\(\) needs a mini-batch: step\(x, \.\.\.\), or step\(\*\*batch\)"),
    ],
)
def test_keywords_that_do_not_fit_are_refused(layer: type[nn.Module], call: dict[str, Any], message: str) -> None:
    pipe = piped(model(layer()), [2, 2], chunks=2)
    with pytest.raises(TypeError, match=message):
        pipe.step(**call, loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_what_is_said_twice_is_refused() -> None:
    pipe = piped(model(Several()), [2, 2], chunks=2)
    with pytest.raises(TypeError, match="its input contains some of the keywords; pass them once"):
        pipe.step(Arguments((X,), {"mask": Y}), mask=Y, loss_fn=loss_fn)
