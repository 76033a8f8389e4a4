"""Plans with a loss per micro-batch, and with a loss computed once, on the outputs of the full mini-batch."""

import copy
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import Infeasible, LossSum, Plan, inline, plan
from gpipe._plan._arguments import SCHEDULES, list_placements
from gpipe._plan._costs import Measured
from gpipe._plan._loss import WAITING
from gpipe._plan._search import search
from gpipe.engine._worker_steps import Size, waits
from gpipe.simulate import simulate
from profiler import Profile, profile

from ..layers import assert_same
from ..plans import everything, few, measurements, space_of

CPUS, WIDTH, ROWS = ["cpu", "cpu"], 48, 64


def root(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is not a sum or mean of the losses of micro-batches."""
    return (output - target).square().mean().sqrt()


def summed(output: Tensor, target: Tensor):
    return LossSum((output - target).square().sum(), output.numel())


def annotated(output: Tensor, target: Tensor) -> LossSum:
    return summed(output, target)


class Counts(nn.Module):
    """A loss with a parameter and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> tuple[Any, ...]:
        return summed(output * self.scale, target), {"largest": output.max()}


EACH: dict[str, dict[str, Any]] = {
    "torch's own": {"loss_fn": F.mse_loss},
    "a module of torch": {"loss_fn": nn.MSELoss()},
    "with keywords": {"loss_fn": partial(F.smooth_l1_loss, beta=0.5)},
    "annotated": {"loss_fn": annotated},
    "seen": {"loss_fn": summed},
    "seen with metrics, a module": {"loss_fn": Counts()},
    "said to be a mean": {"loss_fn": lambda output, target: (output - target).square().mean(), "reduction": "mean"},
    "said to be a sum": {"loss_fn": lambda output, target: (output - target).square().sum(), "reduction": "sum"},
}
ONCE: dict[str, dict[str, Any]] = {
    "of rows together": {"loss_fn": root},
    "torch's own, called": {"loss_fn": lambda output, target: F.mse_loss(output, target)},
    "with metrics": {"loss_fn": lambda output, target: (root(output, target), {"largest": output.max()})},
}


def model() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def made(devices: Any = CPUS, **given: Any) -> Plan:
    x, y = batch()
    return plan(model(), x, devices, target=y, **{"chunks": 4, "calibrate": False, **given})


@pytest.fixture(scope="module")
def known() -> Profile:
    return profile(model(), batch()[0], device="cpu", rows=[16, 32], timeout=0.01, split_backward=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("way", ["measured", "a profile is given", "devices are not there"])
def test_combinable_losses_are_planned_per_micro_batch(name: str, way: str, known: Profile) -> None:
    devices, options = CPUS, {}
    if way == "a profile is given":
        options = {"profile": known}
    elif way == "devices are not there":
        devices = "2x1GB"
    found = made(devices, **EACH[name], **options, schedule="1f1b")
    assert (found.schedule, found.whole_loss) == ("1f1b", False)
    assert "the loss is computed per micro-batch" in str(found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("way", ["measured", "a profile is given", "devices are not there"])
def test_all_other_losses_are_planned_once(name: str, way: str, known: Profile) -> None:
    devices, options = CPUS, {}
    if way == "a profile is given":
        options = {"profile": known}
    elif way == "devices are not there":
        devices = "2x1GB"
    found = made(devices, **ONCE[name], **options)
    assert (found.schedule, found.whole_loss) == ("fill_drain", True)
    assert "the loss is computed once, on the outputs of the full mini-batch" in str(found)
    assert {other.schedule for other in found.alternatives} <= {*WAITING}
    assert [str(event) for event in found.timeline.events].count("C@1") == 1
    assert Plan.from_json(found.to_json()) == found
    for schedule in set(SCHEDULES) - {*WAITING, "interleaved", "interleaved_zero_bubble", "zbv"}:
        with pytest.raises(ValueError, match=rf"schedule='{schedule}' starts backwards .*LossSum.*reduction=.*F\."):
            made(devices, **ONCE[name], **options, schedule=schedule)


@pytest.mark.parametrize("calibrate", [False, True])
def test_full_batch_loss_trains_as_planned(calibrate: bool) -> None:
    """Gradients match the plain model's, and bytes match the plan."""
    plain, (x, y) = model(), batch()
    found = plan(plain, x, CPUS, target=y, loss_fn=root, chunks=4, calibrate=calibrate)
    assert "one step of the engine" in found.notes[-1]
    with closing(found.build(copy.deepcopy(plain))) as pipe:
        value = pipe.step(x, y, loss_fn=root, **found.step_arguments)
        expected = root(plain(x), y)
        expected.backward()
        torch.testing.assert_close(value, expected.detach())
        assert_same(pipe, plain)
        with inline():
            shown = found.verify(x, y)
    assert shown.byte_ratios == pytest.approx([1, 1], rel=0.1)
    assert len(shown.timeline.events) == len(found.timeline.events) == 2 * 2 * found.chunks + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EACH)
def test_verify_uses_the_planned_loss(name: str) -> None:
    plain, (x, y) = model(), batch()
    found = plan(plain, x, CPUS, target=y, **EACH[name], chunks=2)
    with closing(found.build(plain)) as pipe, inline():
        assert len(found.verify(x, y).timeline.events) == 2 * 2 * found.chunks
        with pytest.raises(ValueError, match="loss_fn returned a scalar, but it is not known how"):
            replace(found, schedule="1f1b").verify(x, y, loss_fn=root, pipe=pipe)


def test_infeasible_full_batch_loss_suggests_loss_sum() -> None:
    """A loss per micro-batch needs less memory, because not all outputs are held at once."""
    wide = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100 * WIDTH))
    given = {"chunks": 8, "checkpoint": "never", "calibrate": False, "optimizer": "sgd"}
    x = torch.randn(16 * ROWS, WIDTH)

    def planned(**options: Any) -> Plan:
        return plan(wide, x, CPUS, loss_fn=lambda output: output.square().mean(), **given, **options)

    once, each = (
        max(need.total for need in planned(**options).predicted.bytes) for options in ({}, {"reduction": "mean"})
    )
    assert each < 0.7 * once
    with pytest.raises(Infeasible, match=r"what would fit: .*a loss_fn that returns gpipe\.LossSum"):
        planned(memory=round((each + once) / 2))
    assert planned(memory=round((each + once) / 2), reduction="mean")


def test_only_waiting_schedules_support_full_batch_loss() -> None:
    layouts = [(name, placement) for placement, names in list_placements(SCHEDULES, 2, 4).items() for name in names]
    able = {name for name, placement in layouts if waits(name, Size(8, placement, (0,) * len(placement)))}
    assert able == {*WAITING} & {*SCHEDULES}


@few
@given(measurements(most_layers=4), st.booleans())
def test_full_batch_loss_is_simulated_and_never_hidden(measured: Measured, bare: bool) -> None:
    def with_loss(found: Profile) -> Profile:
        return replace(found, loss=found.layers[0], others=tuple(map(with_loss, found.others)))

    known = replace(measured, profile=measured.profile if bare else with_loss(measured.profile))
    each = replace(space_of(known), schedules=WAITING, modes=("never",))
    once = replace(each, measured=replace(known, whole_loss=True))
    for found in search([once]):
        stages, hops = found.costs.stage_costs(found.sizes, found.modes), found.costs.hops(found.sizes)
        assert found.program(found.chunks).has_loss
        replayed = simulate(found.program(found.chunks), stages, transfer=hops[1:]).makespan
        assert found.seconds == pytest.approx(replayed + measured.step)
        assert [stage.loss > 0 for stage in stages] == [False] * (len(stages) - 1) + [True]
    # Nothing overlaps with this loss, and it holds the outputs of all micro-batches.
    for one, other in zip(everything(once), everything(each), strict=True):
        assert one.seconds >= other.seconds * (1 - 1e-9)
        assert one.fullest >= other.fullest
