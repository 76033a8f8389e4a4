"""Plans whose order of actions is searched, compared with plans that use a named schedule."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import Plan, plan
from gpipe._plan._costs import Measured
from gpipe._plan._host import Host
from gpipe._plan._ordered import find_order
from gpipe._plan._search import search
from gpipe.schedule import Schedule
from gpipe.simulate import simulate

from ..plans import few, looped, measured_of, measurements, space_of

ROWS, WIDTH = 32, 16


@few
@given(measurements(), st.sampled_from([1.0, 1.2, None]), st.booleans())
def test_searched_order_is_no_slower_and_fits(measured: Measured, room: float | None, loops: bool) -> None:
    space = space_of(measured)
    for candidate in search([*(looped(space) if loops else ()), space]):
        memory = [None if room is None else int(room * need.total) for need in candidate.bytes]
        found = find_order(candidate, memory)
        if found is None:  # the search counts tensors for weight gradients from the forward on
            assert room is not None
            continue
        assert found.seconds <= candidate.seconds
        assert found.fits(memory)
        stages, hops = found.costs.stage_costs(found.sizes, found.modes), found.costs.hops(found.sizes)
        predicted = simulate(found.program(found.chunks), stages, transfer=hops[1:])
        assert found.seconds == pytest.approx(predicted.makespan + measured.step)


@few
@given(measurements(), st.booleans())
def test_named_order_needs_the_bytes_of_its_schedule(measured: Measured, loops: bool) -> None:
    space = space_of(measured)
    for candidate in search([*(looped(space) if loops else ()), space]):
        assert replace(candidate, order=candidate.program(candidate.chunks)).account == candidate.account


def test_unsupported_candidates_keep_their_named_schedule() -> None:
    measured = measured_of([(1e-3, 10, 10, 10)] * 4, 2)
    (candidate, *_) = search([space_of(measured)])
    none = [None] * measured.devices
    assert find_order(candidate, none)
    for other in (replace(measured, whole_loss=True), replace(measured, host=Host(parameters=True))):
        assert find_order(replace(candidate, costs=other.cut(candidate.chunks)), none) is None
    assert find_order(replace(candidate, modes=("offload",) * 2), none) is None
    assert find_order(candidate, [1, 1]) is None


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def squares(y: Tensor) -> Tensor:
    return y.square().sum()


OPTIONS: dict[str, Any] = {"loss_fn": squares, "reduction": "sum", "chunks": 4, "calibrate": False}


def test_searched_order_trains_as_planned() -> None:
    x, model, own = torch.randn(ROWS, WIDTH), layers(), layers()
    squares(model(x)).backward()
    found = plan(own, x, ["cpu:0", "cpu:1"], schedule="Search", **OPTIONS)
    assert found.schedule == "search"
    assert Plan.from_json(found.to_json()) == found
    order = found.step_arguments["schedule"]
    assert isinstance(order, Schedule)
    assert str(order) == found.order
    with closing(found.build(own)) as pipe:
        with gpipe.record() as timeline:
            pipe.step(x, loss_fn=squares, reduction="sum", **found.step_arguments)
        assert len(timeline.events) == len(found.timeline.events)
        torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in model.parameters()])
        pipe.zero_grad()
        # The planned order is for four micro-batches. With fewer rows, the pipe searches for one.
        pipe.step(x[:2], loss_fn=squares, reduction="sum", schedule=found.schedule)
        assert found.verify(x, pipe=pipe).ratio > 0


def test_searched_order_is_chosen_if_clearly_faster() -> None:
    """No named schedule suits devices of different speeds."""
    model = nn.Sequential(
        nn.Embedding(50_000, 1024),
        *(each for _ in range(8) for each in (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))),
        nn.Linear(1024, 50_000),
    ).to("meta")
    x = torch.zeros(8192, dtype=torch.long, device="meta")
    devices, options = ["24GB", "12GB", "12GB"], {"loss_fn": torch.sum, "reduction": "sum", "chunks": 8}
    found = plan(model, x, devices, speeds=[1, 0.5, 0.5], **options)
    assert found.schedule == "search"
    fastest = min(other.seconds for other in found.alternatives)
    assert found.predicted.seconds.mid < 0.97 * fastest
    assert found.timeline.makespan == pytest.approx(found.predicted.seconds.mid)
