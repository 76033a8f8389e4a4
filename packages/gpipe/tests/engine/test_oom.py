"""Errors of devices are raised as they are, with a note that says what to do; the pipe can be used afterwards."""

import copy
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe
from gpipe.schedule import SCHEDULES, v_placement

from ..layers import Call, assert_same, linears, piped, rows, running
from ..models import Failing
from ..schedules import V_SHAPED

ERRORS: dict[str, Callable[[], BaseException]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "driver": lambda: RuntimeError("CUDA error: out of memory"),
    "python": MemoryError,
}


def limited(limit: int, phase: str = "forward", error: str = "cuda") -> nn.Module:
    """Return a layer that runs out of memory in one phase if it has more than ``limit`` rows."""
    return Failing(lambda now, x: ERRORS[error]() if now == phase and len(x) > limit else None)


def advice(error: BaseException) -> list[str]:
    return [note for note in error.__notes__ if "set more chunks" in note and "memory=" in note]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("phase", "mode"),
    [("forward", "never"), ("backward", "never"), ("forward", "always"), ("backward", "always"),
     ("recompute", "always")],
)  # fmt: skip
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_oom_error_suggests_more_chunks(schedule: str, phase: str, mode: str, inline: bool):
    devices = [f"cpu:{j}" for j in v_placement(4)] if schedule in V_SHAPED else ["cpu"] * 4
    plain = nn.Sequential(*linears(3), nn.Identity(), *linears(1))
    layers = copy.deepcopy(plain)
    layers[3] = limited(2, phase)
    with closing(GPipe(layers, [1, 1, 2, 1], devices=devices, chunks=2, checkpoint=mode)) as pipe, running(inline):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule)
        assert len(advice(caught.value)) == 1
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.chunks = 4
        pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule)
        F.mse_loss(plain(rows(8)), rows(8)).backward()
        assert_same(pipe, plain)


def test_what_a_device_may_report_late_says_so():
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    with closing(piped(nn.Sequential(*linears(1), Failing(lambda *_: error)), [1, 1], chunks=2)) as pipe:
        with pytest.raises(torch.AcceleratorError) as caught:
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)
        assert caught.value is error
        assert [note for note in error.__notes__ if "an earlier micro-batch" in note]


@pytest.mark.parametrize("error", list(ERRORS))
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_says_that_memory_ran_out(error: str, wrapped: bool):
    def layer(x: Tensor) -> Tensor:
        try:
            return limited(1, error=error)(x)
        except (RuntimeError, MemoryError) as raised:
            if wrapped:
                raise ArithmeticError("the library that is called here") from raised
            raise

    with closing(piped(nn.Sequential(*linears(1), Call(layer)), [1, 1], chunks=2)) as pipe:
        with pytest.raises((RuntimeError, MemoryError, ArithmeticError)) as caught:
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)
        assert len(advice(caught.value)) == 1
