"""What tries the order of work once, and tells what is wrong: steps of pipes, and tests."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from .accelerator import found
from .models import assert_trains_like, counted_squares, model, piped, squares


class Case(NamedTuple):
    """Two training steps, compared with those of the plain model."""

    placement: str
    how: str = "call"
    streams: str = "own"
    mode: str = "never"
    inline: bool = False
    counted: bool = False
    keeps_nodes: bool = False

    def __str__(self) -> str:
        threads = "inline" if self.inline else "threads"
        how = f"{self.how} with a counted loss" if self.counted else self.how
        how += " and kept nodes" * self.keeps_nodes
        return f"{self.placement}, {how}, {self.streams} streams, checkpoint={self.mode}, {threads}"

    def problems(self) -> list[str]:
        """Races, and gradients that differ."""
        return problems(self._train)

    def _train(self) -> None:
        pipe = piped(model(), self.placement, self.mode)
        # Nodes belong to the stream on which they were made, here the default one.
        kept = [p.view_as(p).grad_fn.next_functions for p in pipe.parameters() if self.keeps_nodes]
        loss_fn = counted_squares if self.counted else squares
        assert_trains_like(model(), pipe, self.how, self.streams, inline=self.inline, loss_fn=loss_fn)
        del kept


class Check:
    """A test, with its arguments."""

    def __init__(self, test: Callable[..., None], *arguments: Any) -> None:
        self._test = test
        self._arguments = arguments

    def __str__(self) -> str:
        name = self._test.__name__.removeprefix("test_").replace("_", " ")
        return f"{name} ({', '.join(map(str, self._arguments))})" if self._arguments else name

    def problems(self) -> list[str]:
        """Races, and how the test fails."""
        return problems(lambda: self._test(*self._arguments))


def problems(work: Callable[[], None]) -> list[str]:
    """The error with which ``work`` fails, and the races in it."""
    found()
    try:
        work()
    except (Exception, pytest.fail.Exception) as error:
        return [f"{type(error).__name__}: {error}", *(str(race) for race in found())]
    return [str(race) for race in found()]
