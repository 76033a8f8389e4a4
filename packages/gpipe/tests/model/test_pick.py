"""The part of the model's output that a pipe returns."""

import pickle
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import DOUBLE, assert_same, rows
from .residuals import Residuals, plain_of


class Fields(Residuals):
    """Returns several fields."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"logits": found, "norm": found.square().mean(), "others": [x]}


class Attributes(Fields):
    """Returns an object with attributes."""

    def forward(self, x: Tensor) -> Any:
        return Returned(super().forward(x)["logits"])


class Returned(tuple[Any, ...]):
    """A tuple of one, with a name."""

    def __new__(cls, *values: Any) -> "Returned":
        return super().__new__(cls, values)

    @property
    def logits(self) -> Tensor:
        found: Tensor = self[0]
        return found


def made(kind: type[Residuals]) -> Residuals:
    return kind(*(nn.Linear(3, 3) for _ in range(4)))


def centered(output: Any) -> Any:
    return output["logits"] - output["logits"].mean(0)


PICKS: list[tuple[Any, Callable[[Any], Any]]] = [
    ("logits", lambda output: output["logits"]),
    (centered, centered),
    (lambda output: (output["norm"], output["logits"]), lambda output: (output["norm"], output["logits"])),
]


@pytest.mark.parametrize(("pick", "function"), PICKS)
@pytest.mark.parametrize("sample", [None, rows(2)])
@pytest.mark.parametrize("times", [1, 2])
def test_pick_selects_part_of_output(pick: Any, function: Any, sample: Any, times: int) -> None:
    with closing(GPipe(made(Fields), devices=["cpu"] * 2, chunks=3, pick=pick, sample=sample)) as pipe:
        plain = plain_of(pipe)
        for _ in range(times):
            torch.testing.assert_close(pipe(rows(7)), function(plain(rows(7))))


@pytest.mark.parametrize("sample", [None, rows(2)])
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
def test_a_loss_function_gets_what_is_picked(sample: Any, schedule: str) -> None:
    with closing(GPipe(made(Fields), devices=["cpu"] * 2, chunks=3, pick="logits", sample=sample)) as pipe:
        plain = plain_of(pipe)
        loss = pipe.step(rows(7), rows(7), loss_fn=nn.functional.mse_loss, schedule=schedule)
        expected = nn.functional.mse_loss(plain(rows(7))["logits"], rows(7))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(pipe, plain)


def test_the_model_s_loss_may_be_picked() -> None:
    with closing(GPipe(made(Fields), devices=["cpu"] * 2, chunks=3, pick="norm")) as pipe:
        plain = plain_of(pipe)
        expected = plain(rows(7))["norm"]
        expected.backward()
        torch.testing.assert_close(pipe.step(rows(7)), expected.detach())
        assert_same(pipe, plain)


def test_an_attribute_may_be_picked() -> None:
    with closing(GPipe(made(Attributes), devices=["cpu"] * 2, pick="logits")) as pipe:
        torch.testing.assert_close(pipe(rows(7)), plain_of(pipe)(rows(7)).logits)


def test_a_copy_of_a_pipe_picks_the_same() -> None:
    with (
        closing(GPipe(made(Fields), devices=["cpu"] * 2, pick="logits")) as pipe,
        closing(pickle.loads(pickle.dumps(pipe))) as copy,
    ):
        torch.testing.assert_close(copy(rows(7)), pipe(rows(7)))


def test_what_is_no_pick_is_refused() -> None:
    with pytest.raises(TypeError, match="pick must be the name of a field of what the model returns, or a function"):
        GPipe(made(Fields), devices=["cpu"], pick=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "found"), [(Fields, "a dict with the fields logits, norm, others"), (Attributes, "a Returned without it")]
)
def test_pick_of_missing_field_raises(kind: type[Residuals], found: str) -> None:
    error = re.escape(f"pick='loss' names no field of the output, {found}")
    with closing(GPipe(made(kind), devices=["cpu"] * 2, pick="loss")) as pipe, pytest.raises(ValueError, match=error):
        pipe(rows(7).to(DOUBLE))
