"""Predicted bytes, compared with the bytes of all storages in a real step."""

import copy
import re
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, Infeasible, inline, plan
from gpipe._plan import _measure
from gpipe._plan._arguments import SCHEDULES, list_placements, read_bytes
from gpipe._plan._candidate import Candidate, compute_stops
from gpipe._plan._costs import Costs, Measured
from gpipe._plan._dry_run import dry_run, in_turns
from gpipe._plan._loss import WAITING, StepLoss
from gpipe._plan._planned import as_input, find_layers
from gpipe._plan._verify import peak_bytes
from gpipe.schedule import SPLITTING, named, zero_bubble
from gpipe.simulate import Link
from profiler import Profile, profile

from ..layers import Call, Pop, Stash
from ..model.test_packed import Model as Packed
from ..models import CHANNELS, PARTS, fresh, residual
from ..models import WIDTH as PART_WIDTH

CHUNKS, ONE_EACH = 6, (0, 1)
MODES = [["never", "never"], ["always", "always"], ["always", "never"], ["except_last", "except_last"]]
WIDTH, ROWS = 48, 64


def loss(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def costs_of(
    model: nn.Sequential, x: Tensor, chunks: int, loss_fn: Any, placement: tuple[int, ...], *, whole: bool
) -> Costs:
    """Return costs of layers with equal times, so that stages lag behind each other equally in every run."""
    rows = len(x) // chunks
    found = profile(
        model, x, device="cpu", rows=[rows // 2, rows], loss_fn=loss_fn, timeout=1e-3, split_backward=True
    ).at(rows)
    profiled = alike(found)
    links = (Link(),) * len(placement)
    return Measured(
        profiled, (0,) * len(model), len(x), x.nbytes, x.requires_grad, separate_memory=False,
        placement=placement, links=links, whole_loss=whole,
    ).cut(chunks)  # fmt: skip


def alike(found: Profile) -> Profile:
    return replace(found, layers=tuple(replace(each, forward_seconds=1.0, backward_seconds=2.0) for each in found))


@pytest.fixture
def layers_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all layers equal times, so that a plan's choices depend only on bytes."""

    def measured_alike(request: Any) -> Any:
        found, *rest = measured(request)
        return alike(replace(found, others=tuple(alike(each) for each in found.others))), *rest

    measured = _measure._profile
    monkeypatch.setattr(_measure, "_profile", measured_alike)


def taken(
    model, x, balance, modes, schedule, split=(), chunks=CHUNKS, loss_fn=loss, placement=ONE_EACH, seconds=None,
    whole=False,
) -> list[int]:  # fmt: skip
    """Return the peak bytes of each device in the second step. The first step detects the properties of the layers.

    Stages take turns as if each action of stage j took ``seconds[j]``. By default, the last stage that can run does.
    """
    pipe = GPipe(model, balance, devices=["cpu"] * len(placement), chunks=chunks, checkpoint=modes)
    programs = named(schedule, chunks, placement, compute_stops(modes, chunks), split)
    programs = programs.with_loss() if whole else programs
    if seconds:
        programs = in_turns(programs, placement, seconds)
    with inline():
        given = {"loss_fn": loss_fn, "reduction": None if whole else "mean"}
        pipe.step(x, **given, schedule=programs)
        return peak_bytes(pipe, x, None, given, programs, placement)


PIECES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "view": nn.Flatten,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "residual": lambda: residual(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}


def squares(output: Tensor, _: object) -> Tensor:
    """Return a loss whose intermediate results are several times as large as the output."""
    return (output.square() * output.sigmoid()).mean()


SQUARES = {"loss_fn": lambda output: squares(output, None), "reduction": "mean"}


@st.composite
def cases(draw: st.DrawFn):
    names = draw(st.lists(st.sampled_from(sorted(PIECES)), min_size=2, max_size=7))
    layers = [nn.Linear(WIDTH, WIDTH), *(PIECES[name]() for name in names)]
    if draw(st.booleans()):
        source = draw(st.integers(1, len(layers)))
        layers[source:source] = [Stash()]
        layers.insert(draw(st.integers(source + 1, len(layers))), Pop())
    layers.append(nn.Linear(WIDTH, draw(st.sampled_from([8, 6 * WIDTH]))))
    schedule = draw(st.sampled_from(SCHEDULES))
    (placement,) = list_placements([schedule], 2, len(layers))
    inner = draw(st.permutations(range(1, len(layers))))[: len(placement) - 1]
    sizes = [b - a for a, b in pairwise([0, *sorted(inner), len(layers)])]
    modes = draw(st.sampled_from(MODES)) * (len(placement) // 2)
    chunks = draw(st.sampled_from([1, 2, 3, 5]))
    whole = schedule in WAITING and draw(st.booleans())
    return nn.Sequential(*layers), sizes, placement, modes, schedule, chunks, draw(st.booleans()), whole


AHEAD = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 8))
"""With these layers, the first stage needs a fifth more memory if it recomputes while the other one lags behind."""


@settings(max_examples=min(10, settings.default.max_examples // 2), suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.lists(st.floats(0.1, 10), min_size=4, max_size=4))
@example((AHEAD, [1, 3], ONE_EACH, ["always"] * 2, "1f1b", 2, False, False), [1.0] * 4)
@example((copy.deepcopy(AHEAD), [1, 3], ONE_EACH, ["never"] * 2, "fill_drain", 5, False, True), [1.0] * 4)
def test_dry_run_predicts_the_bytes_of_a_step(case, speeds: list[float]):
    """Cases have skips into, out of and past stages, split backwards, loops, and a loss with large temporaries.

    The loss may be computed once, on the outputs of the full mini-batch.
    """
    model, balance, placement, modes, schedule, chunks, needs_gradient, whole = case
    x = torch.randn(ROWS * chunks, WIDTH, requires_grad=needs_gradient)
    split = (1,) if schedule in SPLITTING else ()
    costs = costs_of(model, x, chunks, squares, placement, whole=whole)
    candidate = Candidate(costs, schedule, tuple(balance), tuple(modes), 0.0, split)
    ran_dry = dry_run(
        find_layers(copy.deepcopy(model), x, len), x, None, StepLoss(squares, None if whole else "mean"), candidate
    )
    assert "one step of the engine" in ran_dry.note
    paces = [None, [4.0**j for j in range(len(balance))], [4.0**-place for place in placement], speeds[: len(balance)]]
    found, ahead, behind, raced = (
        taken(model, x, balance, modes, schedule, split, chunks, squares, placement, pace, whole) for pace in paces
    )
    most = [*map(max, found, ahead, behind)]
    assert [each.total for each in ran_dry.bytes] == pytest.approx(most, rel=0.05, abs=4096)
    # The same at arbitrary speeds of the stages.
    assert all(each.total >= 0.9 * size - 4096 for each, size in zip(ran_dry.bytes, raced, strict=True))
    assert all(min(each.by_kind.values()) >= 0 for each in ran_dry.bytes)
    # The estimate without a dry run is rough, and only serves to compare candidates.
    assert all(0.5 * true <= need.total <= 2.5 * true for need, true in zip(candidate.account, found, strict=True))


def test_tied_parameters_count_on_every_stage():
    """Each of these stages has a copy and a gradient. The optimizer's state exists once."""
    embedding = nn.Embedding(1000, WIDTH)
    head = nn.Linear(WIDTH, 1000, bias=False)
    head.weight = embedding.weight
    model, x = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), head), torch.randint(1000, (8 * CHUNKS,))
    found = plan(
        model,
        x,
        "2x1GB",
        chunks=CHUNKS,
        schedule="1f1b",
        checkpoint="never",
        loss_fn=lambda y: y.mean(),
        reduction="mean",
    )
    first, last = found.predicted.bytes
    size = embedding.weight.nbytes
    assert first.parameters >= size <= last.parameters
    assert first.gradients >= size <= last.gradients
    assert first.optimizer + last.optimizer == 2 * sum(parameter.nbytes for parameter in model.parameters())
    real = taken(model, x, found.balance, found.modes, "1f1b", loss_fn=lambda y, _: y.mean())
    assert [need.total - need.optimizer for need in (first, last)] == pytest.approx(real, rel=0.2)


def test_memory_saved_by_lstm_kernels_is_counted():
    layers = [each for _ in range(4) for each in (nn.LSTM(32, 32, batch_first=True), Call(itemgetter(0)))]
    model, x = nn.Sequential(*layers), torch.randn(64, 16, 32)
    given = {"chunks": 4, "schedule": "1f1b", "checkpoint": "never", "optimizer": "sgd", "calibrate": False}
    found = plan(model, x, ["cpu"] * 2, loss_fn=lambda output: output.mean(), reduction="mean", **given)
    real = taken(model, x, found.balance, found.modes, "1f1b", chunks=4, loss_fn=lambda output, _: output.mean())
    assert [need.total for need in found.predicted.bytes] == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_plan_splits_stages_that_the_engine_splits(name: str):
    torch.manual_seed(0)
    model = nn.Sequential(fresh(), fresh(), *PARTS[name].layers())
    x = torch.randn(4, CHANNELS, PART_WIDTH, requires_grad=True)
    found = profile(model, x, device="cpu", timeout=1e-6, split_backward=True)
    pipe = GPipe(model, [1, len(model) - 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    with inline():
        pipe.step(x, loss_fn=loss, reduction="mean", schedule=zero_bubble(2, 2, split=[1]))
    whole = pipe._pipeline.stages[1].runs_whole
    assert any(layer.backward_input_seconds is None for layer in found) == whole


UNITS = {"B": 1, "kB": 10**3, " KiB": 2**10, "MB": 10**6, "MiB": 2**20, " GB": 10**9, "GiB": 2**30, "TB": 10**12}


@given(st.integers(1, 9999), st.sampled_from(sorted(UNITS)))
def test_sizes_as_text(quarters: int, unit: str):
    number = quarters / 4
    assert read_bytes(f"{number:g}{unit}".lstrip("0")) == round(number * UNITS[unit])
    assert read_bytes(number) == round(number)


@pytest.mark.parametrize("wrong", ["lots", "80", "80Gb", "80 GBs", "", "GB", "-1GB", "0GB", "1e400GB", "nan", 0, -5])
def test_invalid_sizes_raise(wrong: str | int):
    with pytest.raises(ValueError, match=r"memory: expected bytes, such as 8_000_000_000, '80GB' .*; got"):
        read_bytes(wrong)


@pytest.mark.usefixtures("layers_take_as_long")
def test_dry_run_bytes_fit_despite_lower_estimate():
    """The estimate of layers with in-place operations is a twentieth too low."""
    model, x = nn.Sequential(*[PIECES["in place"]() for _ in range(4)]), torch.randn(ROWS, WIDTH)
    given = {**SQUARES, "chunks": 4, "schedule": "1f1b", "calibrate": False}
    free = plan(model, x, ["cpu"] * 2, checkpoint="never", **given)
    room = int(0.98 * free.predicted.bytes[0].total)  # one layer less, or one that is recomputed, saves more
    found = plan(model, x, ["cpu"] * 2, memory=[room, 2 * room], **given)
    assert "one step of the engine" in found.notes[-1]
    assert found.predicted.bytes[0].total <= room


def test_dry_run_bytes_fit_despite_higher_estimate():
    """The estimate of two stages on a device adds up peaks that occur at different times."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
    x, devices = torch.randn(ROWS, WIDTH), ["cpu:0", "cpu:1"]
    # All plans use the same profile, since its seconds determine which backwards are split.
    known = profile(model, x, device="cpu", chunks=4, timeout=0.01, split_backward=True)
    given = {"chunks": 4, "schedule": "zbv", "calibrate": False, "profile": known, **SQUARES}
    need = plan(model, x, devices, checkpoint="always", **given).predicted.bytes
    room = [each.total for each in need]
    assert plan(model, x, devices, checkpoint="always", memory=room, **given).predicted.bytes == need
    with pytest.raises(Infeasible, match="short"):
        plan(model, x, devices, checkpoint="always", memory=[size - 1 for size in room], **given)


@pytest.mark.usefixtures("layers_take_as_long")
def test_suggested_memory_is_enough():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
    given = {"chunks": 4, "schedule": "1f1b", "calibrate": False, **SQUARES}
    with pytest.raises(Infeasible) as refused:
        plan(model, torch.randn(ROWS, WIDTH), ["cpu", "cpu"], memory=1000, **given)
    told = int(re.search(r"memory=(\d+)", str(refused.value))[1])
    assert plan(model, torch.randn(ROWS, WIDTH), ["cpu", "cpu"], memory=told, **given)


def test_hypothetical_devices_use_fused_attention():
    """They save no attention scores."""

    def first(dropout: float) -> int:
        model = nn.Sequential(
            nn.TransformerEncoderLayer(32, 4, 32, dropout=dropout, batch_first=True), nn.Linear(32, 32)
        )
        given = {"chunks": 2, "schedule": "1f1b", "checkpoint": "never", **SQUARES}
        found = plan(model, torch.rand(4, 256, 32), "2x1GB", **given)
        assert "one step of the engine" in found.notes[-1]
        return found.predicted.bytes[0].total

    scores = 2 * 4 * 256 * 256 * 4
    assert first(0.1) - first(0.0) < scores


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_bytes_of_packed_weights_with_adapters(checkpoint: str):
    """Weights that cannot be faked count with their real bytes. Outputs and saved tensors count as in a step."""
    model, x = Packed(64), torch.randn(6, 64)
    given = {"loss_fn": squares, "reduction": "mean"}
    options = {"schedule": "fill_drain", "chunks": 2, "checkpoint": checkpoint}
    found = plan(model, x, "2x24GB", **given, **options)
    weights = 4 * 64 * 64 + 3 * 64
    assert weights < sum(need.parameters for need in found.predicted.bytes) < 1.5 * weights + 4 * 4 * (4 * 64 + 66)
    with closing(GPipe(model, found.balance, devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)) as pipe, inline():
        pipe.step(x, **given, schedule="fill_drain")
        real = peak_bytes(pipe, as_input(model, x), None, given, "fill_drain", ONE_EACH)
    assert [need.total - need.optimizer for need in found.predicted.bytes] == pytest.approx(real, rel=0.1)
