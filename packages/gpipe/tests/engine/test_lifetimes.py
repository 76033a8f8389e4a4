"""A run's tensors are freed as soon as they are unused, while the pipe, its threads and its output live on."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe.schedule import Schedule

from ..layers import Call, OnGradient, Pop, Stash, each_mode, each_way, linears, on_backward, rows
from ..schedules import CHOICES, some_schedule

pytestmark = pytest.mark.usefixtures("no_collector")

Block = Callable[[], AbstractContextManager[Any]]


class Memory:
    """The memory of tensors, without keeping it."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []
        self.counts: list[int] = []

    def watch(self, tensor: Tensor) -> Tensor:
        self._seen.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    @property
    def alive(self) -> int:
        return len({id(storage) for seen in self._seen if (storage := seen()) is not None})

    def layer(self, splits: bool) -> nn.Module:
        """Watches its input, its output, and the gradient of that unless its backward ``splits``."""

        def act(x: Tensor) -> Tensor:
            output = self.watch(x) * 2
            output = self.watch(output if splits else OnGradient.apply(output, lambda grad: self.watch(grad) * 1))
            self.counts.append(self.alive)
            return output

        return Call(act)


def watched(stages: int, mode: str, microbatches: int, *, splits: bool = False) -> tuple[GPipe, Memory]:
    """A pipe of layers that are watched, with a skip past all of them."""
    memory = Memory()
    stashes = Stash(lambda x: memory.watch(x * 2))
    model = nn.Sequential(*linears(1), stashes, *(memory.layer(splits) for _ in range(3)), Pop(), *linears(1))
    balance = {1: [7], 2: [4, 3], 3: [3, 1, 3]}[stages]
    return GPipe(model, balance, devices=["cpu"] * stages, chunks=microbatches, checkpoint=mode), memory


def backward(pipe: GPipe) -> object:
    output = pipe(rows(8, grad=True))
    output.square().sum().backward()
    return output


def failing(phase: str, run: Callable[[GPipe], object]) -> Callable[[GPipe], object]:
    """A run in which the last layer fails."""

    def fail(*_: Any) -> Any:
        raise ArithmeticError

    def fails(pipe: GPipe) -> object:
        if phase == "forward":
            pipe[-1].register_forward_pre_hook(fail)
        else:
            pipe[-1].register_forward_hook(lambda _, inputs, output: on_backward(output, fail))
        with pytest.raises(ArithmeticError):
            run(pipe)
        return True

    return fails


def stepped(schedule: Schedule | str, *, grad: bool = False) -> Callable[[GPipe], object]:
    return lambda pipe: pipe.step(
        rows(8, grad=grad),
        loss_fn=lambda y, _: y.square().mean(),
        reduction="mean",
        schedule=schedule,
        return_outputs=True,
    )


def stepped_once(pipe: GPipe) -> object:
    """Run a step with a full-batch loss."""
    return pipe.step(rows(8, grad=True), loss_fn=lambda y, _: y.std(0).sum(), return_outputs=True)


ENDS: dict[str, Callable[[GPipe], object]] = {
    "a loss of all rows": stepped_once,
    "no_grad": torch.no_grad()(lambda pipe: pipe(rows(8))),
    "inference": torch.inference_mode()(lambda pipe: pipe(rows(8))),
    "evaluation": torch.no_grad()(lambda pipe: pipe.eval()(rows(8))),
    "backward": backward,
    "forgotten": lambda pipe: pipe(rows(8)) is None,
    **{f"{phase} fails": failing(phase, backward) for phase in ("forward", "backward")},
    **{f"{phase} of a step fails": failing(phase, stepped("1f1b")) for phase in ("forward", "backward")},
}
"""Ways in which a run ends, and the object its caller keeps."""


@pytest.mark.one_in(7)
@each_mode
@each_way
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_afterwards_nothing_is_kept_although_the_output_lives(stages: int, end: str, way: Block, mode: str):
    pipe, memory = watched(stages, mode, 4)
    with way():
        held = ENDS[end](pipe)
    assert memory.alive == 0
    assert held is not None
    pipe.close()


@pytest.mark.one_in(5)
@each_mode
@each_way
@pytest.mark.parametrize("stages", [1, 2, 3])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(choices=CHOICES, grad=st.booleans(), splits=st.booleans())
def test_custom_schedules_free_everything(
    stages: int, way: Block, mode: str, choices: tuple[int, ...], grad: bool, splits: bool
):
    pipe, memory = watched(stages, mode, 4, splits=splits)
    with way():
        held = stepped(some_schedule(choices, 4, range(stages), 0), grad=grad)(pipe)
    assert memory.alive == 0
    assert held is not None
    pipe.close()


@each_mode
@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_inference_holds_two_micro_batches(block: Block, mode: str):
    """Evaluation memory does not grow with the number of micro-batches."""
    most = []
    for microbatches in (4, 12):
        pipe, memory = watched(3, mode, microbatches)
        with block(), inline():
            pipe(rows(2 * microbatches))
        most.append(max(memory.counts))
    assert most[0] == most[1]


@each_way
def test_unused_recomputed_output_is_freed_early(way: Block):
    pipe = GPipe(linears(2), [1, 1], devices=["cpu"] * 2, checkpoint="always")
    with way():
        output = pipe(rows(grad=True))
    total, memory = output.sum(), weakref.ref(output.untyped_storage())
    del output
    assert memory() is None
    total.backward()
    pipe.close()
