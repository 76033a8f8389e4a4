"""Plans for many machines: layouts, links, the average of gradients, and who does what."""

from dataclasses import replace
from inspect import signature
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import Infeasible, Plan, plan
from gpipe._plan._arguments import SCHEDULES
from gpipe._plan._candidate import Space
from gpipe._plan._costs import Measured
from gpipe._plan._fleet import BETWEEN, INSIDE, Fleet, Layout, layouts_of, read_fleet
from gpipe._plan._search import NEAR, search
from gpipe.distributed import Rank, average_gradients
from gpipe.simulate import Link

from ..plans import everything, few, measurements

counts = st.integers(1, 12)
WIDTH, ROWS = 2**13, 64


def large(layers: int = 8) -> nn.Sequential:
    """Layers of 256 MiB each, without data."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def made(devices: str = "4x4x3GB", rows: int = ROWS, **options: Any) -> Plan:
    return plan(large(), torch.zeros(rows, WIDTH, device="meta"), devices, **options)


@pytest.fixture(scope="module")
def example() -> Plan:
    return made()


def fleet(nodes: int, count: int, **links: Any) -> Any:
    return read_fleet(f"{nodes}x{count}x80GB", **links)


def links(fake: Fleet, layout: Layout) -> tuple[Link, ...]:
    hops = pairwise(layout.placement)
    return Link(), *(Link() if a == b else fake.link(layout.devices, a, b) for a, b in hops)


@given(counts, counts, st.integers(1, 20), st.integers(1, 200))
def test_layouts_are_all_that_use_each_device_and_give_each_replica_as_many_rows(
    nodes: int, count: int, layers: int, rows: int
) -> None:
    expected = [
        (nodes * count // devices, devices)
        for devices in range(1, layers + 1)
        if nodes * count % devices == 0 and rows % (nodes * count // devices) == 0
    ]
    if not expected:
        with pytest.raises(ValueError, match=f"sample: expected rows that go evenly .* has {rows} rows"):
            layouts_of(fleet(nodes, count).replicas(layers), layers, rows, None, SCHEDULES)
        return
    found = layouts_of(fleet(nodes, count).replicas(layers), layers, rows, None, SCHEDULES)
    assert list(dict.fromkeys((each.replicas, each.devices) for each in found)) == expected
    assert all(each.replicas * each.rows == rows for each in found)
    for times, devices in expected:
        placements = [each.placement for each in found if each.replicas == times]
        # Two stages on each of several devices in loops and in a V, if there are so many layers, and one.
        assert len(set(placements)) == len(placements) == (3 if 1 < devices <= layers // 2 else 1)
        assert all({*placement} == {*range(devices)} for placement in placements)
    assert all(1 <= m <= each.rows for each in found for m in each.chunks)


@given(counts, counts, st.integers(1, 40))
def test_a_hop_is_one_between_nodes_if_it_is_that_in_any_replica(nodes: int, count: int, k: int) -> None:
    if nodes * count % k:
        return
    fake = fleet(nodes, count, bandwidth=["2GB", "1GB"])
    for a, b in permutations(range(k), 2):
        crosses = any((q * k + a) // count != (q * k + b) // count for q in range(nodes * count // k))
        assert fake.link(k, a, b).bandwidth == (1e9 if crosses else 2e9)


@few
@given(measurements(most_layers=4), st.sampled_from([(1, 2), (2, 2), (2, 1)]), st.floats(1e3, 1e6))
def test_no_layout_is_much_faster(measured: Measured, devices: tuple[int, int], bandwidth: float) -> None:
    fake = fleet(*devices, bandwidth=[2 * bandwidth, bandwidth])
    spaces = [
        Space(
            replace(
                measured, rows=each.rows, replicas=each.replicas, apart=True,
                input_bytes=measured.input_bytes // each.replicas, placement=each.placement,
                links=links(fake, each), ring=fake.ring,
            ),
            each.chunks, each.schedules, ("never",), (None,) * each.devices,
        )
        for each in layouts_of(fake.replicas(measured.layers), measured.layers, measured.rows, [1, 2, 4], SCHEDULES)
    ]  # fmt: skip
    found = search(spaces)
    least = min(each.seconds for some in spaces for each in everything(some))
    assert found[0].seconds <= least * 1.12 * (1 + NEAR)


def test_nothing_fits_anywhere() -> None:
    with pytest.raises(Infeasible, match=r"device \d \(fake 300MB\) has .* what would fit: "):
        made("2x2x300MB")


@pytest.mark.parametrize(("memory", "stages"), [("20GB", 1), ("3GB", 8)])
def test_as_few_stages_as_fit_where_links_are_fast(memory: str, stages: int) -> None:
    found = made("4x4x80GB", 2**16, memory=memory, chunks=[4, 16, 64], bandwidth=["10000GB", "10000GB"])
    assert (found.replicas, len(found.balance)) == (16 // stages, stages)


def test_a_plan_uses_all_devices_and_all_rows(example: Plan) -> None:
    stages = len(example.balance)
    assert example.replicas * stages == 16
    assert example.rows == ROWS
    assert example.chunks <= ROWS // example.replicas
    assert example.predicted.throughput == pytest.approx(ROWS / example.predicted.seconds.mid)
    assert all(need.total <= 3 * 10**9 for need in example.predicted.bytes)


def test_bytes_are_those_of_the_layers_of_a_stage(example: Plan) -> None:
    assert set(example.devices) == {"fake 3GB"}
    for size, need in zip(example.balance, example.predicted.bytes, strict=True):
        assert (need.parameters, need.optimizer) == (size * 2**28, 2 * size * 2**28)
    assert "an estimate: nothing ran" in example.notes[0]
    assert Plan.from_json(example.to_json()) == example


def test_the_average_of_gradients_takes_a_ring_after_the_last_backward(example: Plan) -> None:
    largest = max(example.balance) * 2**28
    r = example.replicas
    assert r > 1
    assert example.reduction == pytest.approx(2 * (r - 1) / r * largest / BETWEEN.bandwidth)
    assert example.predicted.seconds.mid == pytest.approx(example.timeline.makespan + example.reduction)


def test_one_replica_builds() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    found = plan(layers, torch.zeros(8, 4), "2x2x1GB")
    x = torch.zeros(8 // found.replicas, 4)
    pipe = found.build(layers, devices=["cpu"] * len(found.balance))
    shown = found.verify(x, loss_fn=lambda output, _: output.sum())
    assert shown.predicted_seconds == found.predicted.seconds.mid - found.reduction
    pipe.close()


def test_a_layer_that_refuses_a_single_row() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = plan(layers, torch.zeros(8, 4), "2x2x1GB")
    assert all(other.chunks < ROWS for other in found.alternatives)
    assert found.chunks < 8 // found.replicas


def test_arguments_for_ranks_are_those_of_the_plan(example: Plan) -> None:
    read = Plan.from_json(example.to_json())
    assert read.mesh_shape == (example.replicas, len(example.balance))
    assert read.rank_arguments == {
        "balance": example.balance,
        "chunks": example.chunks,
        "checkpoint": example.checkpoint,
        "ranks": list(range(len(example.balance))),
    }
    signature(Rank).bind(large(), **read.rank_arguments)
    signature(Rank.step).bind(None, None, **read.step_arguments)


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("memory", ["14kB", "20kB"])  # a replica of four stages, and two of two
def test_processes_that_do_as_planned_train_the_model(worlds: Any, memory: str) -> None:
    found = plan(small(), torch.zeros(16, 16), f"2x2x{memory}", chunks=2)
    assert (found.replicas, len(found.balance)) == {"14kB": (1, 4), "20kB": (2, 2)}[memory]
    worlds(4).run(_expect_as_the_model, found.to_json())


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def _expect_as_the_model(text: str) -> None:
    found, loss_fn = Plan.from_json(text), nn.functional.mse_loss
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16, 16, generator=generator)
    mesh = dist.init_device_mesh("cpu", found.mesh_shape, mesh_dim_names=("replica", "pipe"))
    rank, plain = Rank(small(), **found.rank_arguments, group=mesh.get_group("pipe")), small()
    own = mesh.get_local_rank("replica")
    loss_fn(plain(x), y).backward()
    rank.step(x.chunk(found.replicas)[own], y.chunk(found.replicas)[own], loss_fn=loss_fn, **found.step_arguments)
    average_gradients(rank, mesh.get_group("replica"))
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_links() -> None:
    assert (fleet(2, 2).inside, fleet(2, 2).between) == (INSIDE, BETWEEN)
    one = fleet(2, 2, bandwidth="1GB")
    assert (one.inside, one.between) == (Link(INSIDE.latency, 1e9), Link(BETWEEN.latency, 1e9))
    assert fleet(1, 2, bandwidth=["1GB"], latency=0).inside == Link(0, 1e9)
    assert fleet(2, 2, bandwidth=[1, 2], latency=[3, 4]).between == Link(4, 2)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"devices": "0x8x80GB"}, ValueError, "devices: expected at least one, got '0x8x80GB'"),
        ({"devices": "8x8xlots"}, ValueError, "devices: .* nodes and the devices of each, as in '64x8x80GB'; got"),
        ({"devices": ["cpu"], "bandwidth": "1GB"}, ValueError, "bandwidth: goes with devices that are not there"),
        ({"devices": ["cpu"], "latency": 1e-6}, ValueError, "latency: goes with devices that are not there"),
        ({"bandwidth": "400Gb"}, ValueError, "bandwidth: expected bytes"),
        ({"bandwidth": [1, 2, 3]}, ValueError, "bandwidth: expected one for all links, or two"),
        ({"latency": -1.0}, ValueError, "latency: expected seconds that are not negative"),
        ({"latency": "5us"}, TypeError, "latency: expected seconds, such as 5e-6; got '5us'"),
        ({"memory": ["80GB"] * 16}, ValueError, "memory: expected one size, or one for each of 8 devices, got 16"),
        ({"chunks": 65}, ValueError, "chunks: expected numbers from 1 to 32"),
        ({"rows": 63}, ValueError, r"rows that go evenly .* 16 \(of 1 stages\), 8 \(of 2 stages\).* has 63 rows"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_counted(
    wrong: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe._plan._make.measure", None)
    with pytest.raises(error, match=message):
        made(**wrong)
