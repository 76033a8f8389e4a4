"""Plans for hypothetical devices: the stages to search, links, speeds, bytes, and arguments for ranks."""

import re
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe import Infeasible, Plan, plan
from gpipe._plan import _speeds
from gpipe._plan._arguments import read_facts, read_memory, read_speeds
from gpipe._plan._candidate import SearchSpace
from gpipe._plan._costs import Measured
from gpipe._plan._fake_devices import read_fake
from gpipe._plan._host import Host
from gpipe._plan._links import LINK
from gpipe._plan._request import read_placements, read_places
from gpipe._plan._search import NEAR, search
from gpipe._plan._speeds import at_full_speed, measure_speeds
from gpipe.distributed import Rank
from gpipe.simulate import Link

from ..in_rows import InRows
from ..plans import everything, few, links_of, measurements, profile_of

counts = st.integers(1, 12)
WIDTH, ROWS = 2**13, 64


def large(layers: int = 8) -> nn.Sequential:
    """Return layers of 256 MiB each on ``meta``."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def made(devices: str = "4x3GB", **options: Any) -> Plan:
    return plan(large(), torch.zeros(ROWS, WIDTH, device="meta"), devices, **options)


@pytest.fixture(scope="module")
def example() -> Plan:
    return made()


@given(counts, st.integers(1, 20))
def test_search_uses_at_most_one_device_per_layer(count: int, layers: int) -> None:
    devices = f"{count}x80GB"
    places = read_places(devices, read_fake(devices), layers)
    assert places == [torch.device("meta")] * min(count, layers)
    found = read_placements(devices, places, layers, None, Host())
    # One stage per device. With enough layers for two stages on each of several devices, also loops and a V.
    assert len(found) == (3 if 1 < len(places) <= layers // 2 else 1)
    assert all({*placement} == {*range(len(places))} for placement in found)


@few
@given(measurements(most_layers=4), st.integers(1, 4), st.floats(1e3, 1e6))
def test_no_placement_is_much_faster_than_the_plan(measured: Measured, count: int, bandwidth: float) -> None:
    devices = f"{count}x80GB"
    fake = read_fake(devices, bandwidth)
    assert fake is not None
    places = read_places(devices, fake, measured.layers)
    spaces = [
        SearchSpace(
            replace(measured, separate_memory=True, placement=placement, links=links_of(placement, fake.links[0][-1])),
            [1, 2, 4], names, ("never",), (None,) * len(places),
        )
        for placement, names in read_placements(devices, places, measured.layers, None, Host()).items()
    ]  # fmt: skip
    found = search(spaces)
    least = min(each.seconds for some in spaces for each in everything(some))
    assert found[0].seconds <= least * 1.12 * (1 + NEAR)


def test_hop_time_is_latency_plus_bytes_over_bandwidth() -> None:
    found = made("2x80GB", chunks=1, schedule="1f1b", bandwidth="1GB", latency=0.5)
    assert found.hops == (0.0, 0.5 + ROWS * WIDTH * 4 / 1e9)


def test_infeasible_names_hypothetical_device_and_changes() -> None:
    with pytest.raises(Infeasible, match=r"device \d \(fake 300MB\) has .* what would fit: "):
        made("4x300MB")


def test_bytes_match_the_layers_of_each_device(example: Plan) -> None:
    assert set(example.devices) == {"fake 3GB"}
    sizes = [0] * 4
    for place, size in zip(example.placement, example.balance, strict=True):
        sizes[place] += size
    for size, need in zip(sizes, example.predicted.bytes, strict=True):
        assert (need.parameters, need.optimizer) == (size * 2**28, 2 * size * 2**28)
        assert need.total <= 3 * 10**9
    assert "an estimate: nothing ran" in example.notes[0]
    assert Plan.from_json(example.to_json()) == example


def test_step_covers_the_full_mini_batch(example: Plan) -> None:
    assert example.rows == ROWS
    assert example.predicted.throughput == pytest.approx(ROWS / example.predicted.seconds.mid)
    assert example.predicted.seconds.mid == pytest.approx(example.timeline.makespan)


def test_hypothetical_plan_builds_on_real_devices() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    found = plan(layers, torch.zeros(8, 4), "4x1GB")
    pipe = found.build(layers, devices=["cpu"] * len(found.devices))
    shown = found.verify(torch.zeros(8, 4), loss_fn=lambda output, _: output.sum())
    assert shown.predicted_seconds == found.predicted.seconds.mid
    pipe.close()


def test_batch_norm_gets_at_least_two_rows() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = plan(layers, torch.zeros(8, 4), "2x1GB")
    assert all(each.chunks < 8 for each in (found, *found.alternatives))


def test_rank_arguments_match_the_plan(example: Plan) -> None:
    read = Plan.from_json(example.to_json())
    assert read.rank_arguments == {
        "balance": example.balance,
        "chunks": example.chunks,
        "checkpoint": example.checkpoint,
        "ranks": list(example.placement),
    }
    signature(Rank).bind(large(), **read.rank_arguments)
    signature(Rank.step).bind(None, None, **read.step_arguments)


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_ranks_built_from_plan_match_plain_model(worlds: Any) -> None:
    found = plan(small(), torch.zeros(16, 16), "4x14kB", chunks=2)
    worlds(4).run(_expect_as_the_model, found.to_json())


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def _expect_as_the_model(text: str) -> None:
    found, loss_fn = Plan.from_json(text), nn.functional.mse_loss
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16, 16, generator=generator)
    rank, plain = Rank(small(), **found.rank_arguments), small()
    loss_fn(plain(x), y).backward()
    rank.step(x, y, loss_fn=loss_fn, **found.step_arguments)
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("options", "link"),
    [
        ({}, LINK),
        ({"bandwidth": "1GB"}, Link(LINK.latency, 1e9)),
        ({"latency": 0}, Link(0, LINK.bandwidth)),
        ({"bandwidth": 2, "latency": 3}, Link(3, 2)),
    ],
)
def test_links_from_bandwidth_and_latency(options: dict[str, Any], link: Link) -> None:
    fake = read_fake("2x80GB", **options)
    assert fake is not None
    assert fake.links == ((Link(), link), (link, Link()))


@pytest.mark.parametrize(
    ("devices", "names", "memory"),
    [
        ("2x80GB", ["80GB"] * 2, [80_000_000_000] * 2),
        (["24GB", "12 GiB"], ["24GB", "12 GiB"], [24_000_000_000, 12 * 2**30]),
        (["2xh100", "A100"], ["H100", "H100", "A100"], [80_000_000_000] * 3),
        (("8GB",), ["8GB"], [8_000_000_000]),
    ],
)
def test_devices_as_text(devices: Any, names: list[str], memory: list[int]) -> None:
    found = read_fake(devices)
    assert found is not None
    assert ([each.name for each in found.each], [each.memory for each in found.each]) == (names, memory)


@pytest.mark.parametrize("devices", [["8GB", "4GB"], ["4GB", "8GB"]])
def test_larger_device_holds_more(devices: list[str]) -> None:
    """Devices are ordered by memory, because the first stage has more micro-batches in flight under 1F1B."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(16)))
    found = plan(model, torch.zeros(ROWS, WIDTH, device="meta"), devices, optimizer="sgd")
    sizes = dict(zip(found.devices, found.predicted.bytes, strict=True))
    assert sizes["fake 8GB"].total > 4e9 > sizes["fake 4GB"].total
    assert dict(zip(found.devices, found.memory, strict=True)) == {"fake 8GB": 8e9, "fake 4GB": 4e9}
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(("speeds", "share"), [([1, 1], 1 / 2), ([3, 1], 3 / 4), ([1, 3], 3 / 4), ([1, 0.5], 2 / 3)])
def test_faster_device_gets_more_layers(speeds: list[float], share: float) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(12)))
    x = torch.zeros(256, WIDTH, device="meta")
    found = plan(model, x, ["81GB", "82GB"], speeds=speeds, chunks=16, schedule="1f1b", optimizer="sgd")
    sizes = dict(zip(found.devices, found.sizes, strict=True))
    fast = max(range(2), key=speeds.__getitem__)
    assert sizes[f"fake {81 + fast}GB"] == pytest.approx(12 * share, abs=1)
    times = [stage.forward / size for stage, size in zip(found.stages, found.sizes, strict=True)]
    assert max(times) / min(times) == pytest.approx(max(speeds) / min(speeds))
    assert [note for note in found.notes if "relative speeds" in note] == [] or speeds != [1, 1]


def test_device_names_imply_speeds() -> None:
    found = plan(large(12), torch.zeros(4096, WIDTH, device="meta"), ["A100", "H100"], chunks=8, schedule="1f1b")
    sizes = dict(zip(found.devices, found.sizes, strict=True))
    assert sizes["fake H100"] > sizes["fake A100"]


@pytest.mark.parametrize("speeds", [[1.0, 0.5], [1.0, 2.0], [1.0, 1.0]])
def test_speeds_of_different_gpus_are_measured(speeds: list[float]) -> None:
    """Times of layers measured on a slower GPU are scaled to the first GPU."""
    devices = [torch.device("cuda", k) for k in range(2)]
    with (
        mock.patch.object(_speeds, "_kind", side_effect=lambda device: f"GPU {speeds[device.index]}"),
        mock.patch.object(_speeds, "_seconds", side_effect=lambda device, dtype: 3 / speeds[device.index]),
    ):
        assert measure_speeds(devices, nn.Linear(2, 2)) == pytest.approx(speeds)
    profile = profile_of([(1e-3, 1, 1, 1)] * 4)
    found = at_full_speed(profile, [1.0, 1.0, *speeds])
    expected = [layer.seconds * speed for layer, speed in zip(profile, [1.0, 1.0, *speeds], strict=True)]
    assert [layer.seconds for layer in found] == pytest.approx(expected)
    assert found.others[0].layers[2].seconds == pytest.approx(profile.others[0].layers[2].seconds * speeds[0])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"devices": ["24GB", "cpu"]}, ValueError, "devices"),
        ({"devices": ["2xlots", "24GB"]}, ValueError, "devices: expected a count with a memory size, .*; got '2xlots'"),
        ({"speeds": [1.0]}, ValueError, r"speeds: expected one per device \(4\), got 1"),
        ({"speeds": [1, 1, 1, "fast"]}, TypeError, r"speeds\[3\]: expected a number, got 'fast'"),
        ({"speeds": [1, 0, 1, 1]}, ValueError, r"speeds\[1\]: expected a positive, finite number, got 0"),
        ({"speeds": 2}, TypeError, "speeds must be a list with one number per device"),
        ({"devices": "0x80GB"}, ValueError, "devices: expected at least one, got '0x80GB'"),
        ({"devices": "8xlots"}, ValueError, "devices: expected a count with a memory size, .*; got '8xlots'"),
        ({"devices": "2x8x80GB"}, ValueError, "devices: expected a count with a memory size, .*; got '2x8x80GB'"),
        ({"devices": ["cpu"], "bandwidth": "1GB"}, ValueError, "bandwidth: requires hypothetical devices"),
        ({"devices": ["cpu"], "latency": 1e-6}, ValueError, "latency: requires hypothetical devices"),
        ({"bandwidth": "400Gb"}, ValueError, "bandwidth: expected bytes"),
        ({"bandwidth": ["2GB", "1GB"]}, TypeError, "bandwidth: expected bytes"),
        ({"latency": -1.0}, ValueError, "latency: expected finite, non-negative seconds"),
        ({"latency": "5us"}, TypeError, "latency: expected seconds, such as 5e-6; got '5us'"),
        ({"latency": [0, 0]}, TypeError, r"latency: expected seconds, such as 5e-6; got \[0, 0\]"),
        ({"memory": ["80GB"] * 16}, ValueError, r"memory: expected one size, or one per device \(4\), got 16"),
        ({"chunks": 65}, ValueError, "chunks: expected numbers from 1 to 64"),
    ],
)
def test_invalid_arguments_raise_before_anything_is_measured(
    wrong: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe._plan._make.measure", None)
    with pytest.raises(error, match=message):
        made(**wrong)


def test_meta_weights_packed_on_loading_raise() -> None:
    """Their size is unknown until they are packed."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), InRows())
    with pytest.raises(ValueError, match=r"model: '1\.weight' is a Rows on 'meta'.*from_pretrained"):
        plan(model, torch.zeros(4, 6), "2x1GB")
    ready = nn.Sequential(nn.Linear(6, 6), InRows().to("cpu"))
    assert (
        sum(need.parameters for need in plan(ready, torch.zeros(4, 6), "2x1GB").predicted.bytes) >= 36 + 8 * 6 + 4 * 42
    )


@settings(few, max_examples=min(5, settings.default.max_examples // 4))
@given(
    st.lists(st.sampled_from([128, 512, 1024]), min_size=3, max_size=7), st.sampled_from([0.5, 1.0, 2.0]), st.booleans()
)
@also([1024, 128, 1024, 1024, 128, 512], 2.0, True)
@also([128, 512, 512, 512], 2.0, False)
def test_offload_is_suggested_only_if_it_fits(widths: list[int], share: float, is_free: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    x, device = torch.zeros(16, widths[0]), [f"{int(share * size)}B"]
    try:
        plan(model, x, device, optimizer="sgd", checkpoint=None if is_free else "never")
    except Infeasible as error:
        if any(change.startswith("offload=True") for change in error.changes):
            plan(model, x, device, optimizer="sgd", checkpoint=None if is_free else "never", offload=True)


def test_devices_without_a_layer_are_not_used() -> None:
    """Their speed and memory limit are ignored as well, for hypothetical and for real devices."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x, loss = torch.zeros(8, 8), {"loss_fn": torch.sum, "reduction": "sum", "calibrate": False, "chunks": 2}
    found = plan(layers, x, ["24GB", "12GB", "6GB"], speeds=[1, 0.5, 0.25], memory=["1GB", "2GB", "3GB"], **loss)
    assert sorted(size or 0 for size in found.memory) == [10**9, 2 * 10**9]
    real = plan(layers, x, (f"cpu:{k}" for k in range(3)), speeds=[1, 0.5, 0.25], **loss)
    assert {*real.devices} == {"cpu:0", "cpu:1"}
    with pytest.raises(ValueError, match=r"speeds: expected one per device \(3\), got 2"):
        plan(layers, x, ["24GB", "12GB", "6GB"], speeds=[1, 0.5], **loss)


@pytest.mark.parametrize("devices", ["24GB", "1x24GB", ["24GB"], iter(["24GB"])])
def test_single_device(devices: Any) -> None:
    found = plan(
        nn.Sequential(nn.Linear(8, 8)), torch.zeros(8, 8), devices, loss_fn=torch.sum, reduction="sum", chunks=1
    )
    assert found.devices == ("fake 24GB",)


def test_report_shows_bytes_per_device_and_kind(example: Plan) -> None:
    text = str(example)
    assert re.search(r"rows/s, devices \d+\.\d % busy", text)
    (kinds,) = [line for line in text.splitlines() if line.startswith("device ")]
    assert kinds.split() == [
        "device",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "transient",
        "total",
        "of",
    ]
    assert [line.split()[:3] for line in text.splitlines() if "fake 3GB" in line][-1][:3] == ["3,", "fake", "3GB"]


def test_neighboring_stages_use_the_fast_links() -> None:
    found = made("4x3GB", bandwidth={(0, 2): "200GB", (3, 1): "200GB", (1, 2): "1MB", (0, 1): "1MB"}, chunks=4)
    assert found.devices == ("fake 3GB",) * 4
    # All other links have 25 GB/s, so the best order is (0, 2, 3, 1), or the reverse.
    assert "links send 25 to 200 GB/s" in found.notes[0]
    assert max(found.hops) < 1.5 * made("4x3GB", chunks=4).hops[1]


FACTS = st.fixed_dictionaries(
    {}, optional={"speed": st.sampled_from([0.5, 2]), "memory": st.sampled_from(["2GB", 10**9])}
)


@given(st.lists(st.tuples(st.sampled_from(["3GB", "2xA100", "1x 80 GiB"]), st.none() | FACTS), min_size=1, max_size=3))
def test_facts_of_devices_equal_separate_arguments(said: list[tuple[str, dict[str, Any] | None]]) -> None:
    names, facts = read_facts([name if own is None else (name, own) for name, own in said])
    plain = read_fake([name for name, _ in said])
    fake = read_fake(names)
    assert fake is not None
    assert plain is not None
    assert fake.each == plain.each
    sizes, counts = [each.memory for each in plain.each], [len(read_fake(name).each) for name, _ in said]
    each = [own or {} for (_, own), count in zip(said, counts, strict=True) for _ in range(count)]
    places = [torch.device("meta")] * len(each)
    expected = [own.get("memory", size) for own, size in zip(each, sizes, strict=True)]
    assert read_memory(None, places, facts, sizes) == read_memory(expected, places)
    speeds = [own.get("speed") for own in each]
    assert read_speeds(None, len(each), facts) == read_speeds(speeds, len(each))


def test_single_device_with_facts_needs_no_list() -> None:
    assert read_facts(("2x3GB", {"memory": "1GB"})) == read_facts([("2x3GB", {"memory": "1GB"})])


def test_plan_with_facts_equals_plan_with_arguments() -> None:
    given = {"optimizer": "sgd", "chunks": 8}
    pairs = made([("3GB", {"speed": 1}), ("2GB", {"speed": 0.5}), ("80GB", {"memory": "3GB"}), "3GB"], **given)
    names = ["3GB", "2GB", "80GB", "3GB"]
    assert pairs == made(names, speeds=[1, 0.5, None, None], memory=["3GB", "2GB", "3GB", "3GB"], **given)


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ([("3GB", {"sped": 1})], {}, r"devices\[0\]: expected speed or memory, got 'sped'"),
        (["3GB", ("3GB", {"speed": 0})], {}, r"devices\[1\]\['speed'\]: expected a positive, finite number, got 0"),
        ([("3GB", {"memory": "1Gb"})], {}, r"devices\[0\]\['memory'\]: expected bytes.*got '1Gb'"),
        ([("3GB", {"speed": 1})], {"speeds": [1]}, "speeds: expected None, since devices= says the speed"),
        ([("3GB", {"memory": "1GB"})], {"memory": "2GB"}, "memory: expected None, since devices= says the memory"),
        ("2x3GB", {"bandwidth": {(0, 2): "1GB"}}, r"bandwidth: expected pairs of the indices of two devices below 2"),
        ("2x3GB", {"bandwidth": {(0, 0): "1GB"}}, r"got \(0, 0\)"),
        ("2x3GB", {"bandwidth": {0: "1GB"}}, "got 0"),
        ("2x3GB", {"bandwidth": {(0, 1): "1Gb"}}, r"bandwidth\[\(0, 1\)\]: expected bytes"),
    ],
)
def test_invalid_facts_and_links_raise(devices: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(devices, **options)
