"""Failures anywhere raise the original error with a note on its origin, and the pipe still works afterwards."""

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.transport._transport import Channel

from .layers import DOUBLE, Call, assert_trains_like, numbered, running, within
from .models import Failing

STAGES = CHUNKS = 3


class CustomError(Exception):
    """One whose constructor and text are its own."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.reason}"


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("no"),
    "CustomError": lambda: CustomError(7, reason="because"),
    "StopIteration": lambda: StopIteration("no"),
    "GeneratorExit": lambda: GeneratorExit("no"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("no"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("no"),
    "BaseException": lambda: BaseException("no"),
}


@dataclass(frozen=True)
class FrozenError(Exception):
    """Its attributes cannot be set, so that even Python cannot add the traceback of a context."""

    code: int


def fragile() -> Failing:
    """Return a layer that raises the error in ``faults`` for a phase and micro-batch."""
    faults: dict[tuple[str, int], BaseException] = {}
    layer = Failing(lambda phase, x: faults.get((phase, int(x.detach().flatten()[0].round()))))
    layer.faults = faults
    return layer


def faulty(**options: Any) -> GPipe:
    """A pipe in which anything can be made to fail; one layer with parameters, that nothing passes by, at the end."""
    model = nn.Sequential(*(fragile() for _ in range(STAGES)), nn.Linear(1, 2, dtype=DOUBLE))
    return GPipe(model, [1, 1, 2], devices=["cpu"] * STAGES, chunks=CHUNKS, **options)


def numbers() -> Tensor:
    """Return two rows per micro-batch, containing its index."""
    return numbered(2 * CHUNKS).div(2, rounding_mode="floor").requires_grad_()


def train(pipe: GPipe) -> None:
    pipe(numbers()).square().sum().backward()


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if note.startswith("in partition")]


def expect_same(pipe: GPipe) -> None:
    """Check that the pipe works again without faults."""
    for layer in list(pipe)[:STAGES]:
        layer.faults.clear()
    assert_trains_like(pipe, copy.deepcopy(pipe[:]), numbers())


@pytest.fixture(scope="module")
def pipes() -> Iterator[dict[str, GPipe]]:
    made = {mode: faulty(checkpoint=mode) for mode in ("always", "except_last", "never")}
    yield made
    for pipe in made.values():
        pipe.close()


@pytest.mark.parametrize("inlined", [False, True], ids=["threaded", "inline"])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_frozen_exception_is_context_of_error(pipes: dict[str, GPipe], phase: str, inlined: bool) -> None:
    pipe, planted = pipes["always"], FrozenError(3)
    pipe[1].faults[phase, 1] = planted
    with running(inlined), pytest.raises((FrozenInstanceError, FrozenError)) as caught:
        train(pipe)
    assert planted in (caught.value, caught.value.__context__)
    assert any("in partition 1" in note for each in (caught.value, planted) for note in notes(each))
    expect_same(pipe)


@pytest.mark.parametrize("inlined", [False, True], ids=["threaded", "inline"])
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_every_fault(pipes: dict[str, GPipe], phase: str, name: str, inlined: bool) -> None:
    checkpoint = "always" if phase == "recompute" else "except_last"
    pipe = pipes[checkpoint]

    def once() -> None:
        with running(inlined):
            train(pipe)

    for stage in range(STAGES):
        for i in range(CHUNKS):
            planted = pipe[stage].faults[phase, i] = ERRORS[name]()
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                within(20, once)
            assert caught.value is planted
            assert caught.traceback[-1].name == "fail"  # its own traceback, without the code that re-raises it
            (note,) = notes(planted)
            layers = "'2' to '3'" if stage == 2 else f"'{stage}'"
            assert note == (
                f"in partition {stage} (layers {layers}) on cpu, micro-batch {i} of {CHUNKS}, {phase}; "
                "input: float64[2, 1]"
            )
            pipe[stage].faults.clear()
    expect_same(pipe)


def ticks(phase: str, j: int, i: int) -> tuple[int, int]:
    return (i + j if phase == "forward" else (CHUNKS - 1 - i) + (STAGES - 1 - j)), j


@given(
    st.sampled_from(["forward", "backward"]),
    st.sets(st.tuples(st.integers(0, STAGES - 1), st.integers(0, CHUNKS - 1)), min_size=2, max_size=2),
)
def test_earlier_fault_is_raised(pipes: dict[str, GPipe], phase: str, places: set[tuple[int, int]]) -> None:
    """The order is the schedule's, if neither fault can prevent the other."""
    (a, i), (b, k) = places
    if a != b and i != k:
        return  # may race: see the next test
    pipe = pipes["never"]
    planted = {}
    for place in places:
        planted[place] = pipe[place[0]].faults[phase, place[1]] = ValueError("no")
    try:
        with pytest.raises(ValueError, match="no") as caught:
            train(pipe)
    finally:
        for layer in list(pipe)[:STAGES]:
            layer.faults.clear()
    assert caught.value is planted[min(places, key=lambda place: ticks(phase, *place))]


def test_later_failure_does_not_hide_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Semaphore(0)
    cancel = Channel.cancel

    def tell(channel: Channel) -> None:
        cancel(channel)
        cancelled.release()

    def fail_at_three(x: Tensor) -> Tensor:
        if x[0, 0] == 3:
            raise ValueError("tick 3")
        return x

    def dawdle(x: Tensor) -> Tensor:
        if x[0, 0] == 0:  # wait until both channels have received the failure of partition 0
            for _ in range(2):
                cancelled.acquire(timeout=20)
        return x

    def fail(x: Tensor) -> Tensor:
        raise KeyError("tick 2")

    monkeypatch.setattr(Channel, "cancel", tell)
    model = nn.Sequential(Call(fail_at_three), Call(dawdle), Call(fail))
    pipe = GPipe(model, [1, 1, 1], devices=["cpu"] * 3, chunks=4)
    with pytest.raises(KeyError, match="tick 2"):
        within(20, lambda: pipe(numbered(4)))
