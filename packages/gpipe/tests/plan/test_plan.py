"""Plans from the first call to the trained pipe: contents, files, verification, and errors."""

import copy
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import Infeasible, LossSum, Plan, check, inline, plan
from microbatch import Replicate
from profiler import profile

from ..layers import Layer, assert_same, linears, piped, rows
from ..model.test_answers import Model
from ..plans import ROWS, model_of, profile_of

CPUS = ["cpu", "cpu"]
KNOWN = profile_of([(1e-3, 40, 400, 10), (2e-3, 40, 400, 10), (1e-3, 10, 100, 10), (4e-3, 40, 400, 10)])


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def model() -> nn.Sequential:
    return model_of(KNOWN)


def made(**options: Any) -> Plan:
    """Return a plan from made-up layer costs. Only the engine is measured."""
    given = {"model": model(), "devices": CPUS, "profile": KNOWN, "calibrate": False, **options}
    return plan(sample=torch.zeros(ROWS, 3), **given)


@pytest.fixture(scope="module")
def example() -> Plan:
    return made(memory="20kB")


@pytest.mark.parametrize("calibrate", [False, True])
def test_planned_pipe_trains_like_the_model(calibrate: bool):
    plain, x, y = linears(4), rows(8), rows(8) * 2
    found = plan(plain, x, CPUS, target=y, loss_fn=loss, calibrate=calibrate)
    assert all(parameter.grad is None for parameter in plain.parameters())
    pipe = found.build(copy.deepcopy(plain))
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == (found.balance, found.chunks, found.checkpoint)
    pipe.step(x, y, loss_fn=loss, **found.step_arguments)
    loss(plain(x), y).backward()
    assert_same(pipe, plain)
    pipe.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zero_bubble", "zbv"])
def test_two_stages_per_device_train_like_the_model(schedule: str):
    plain, x, y = linears(5), rows(8), rows(8) * 2
    given = {"target": y, "loss_fn": loss, "reduction": "mean", "chunks": 4, "schedule": schedule}
    found = plan(plain, x, ["cpu:0", "cpu:1"], memory="1MB", calibrate=schedule == "zbv", **given)
    assert found.schedule == schedule
    assert found.placement == ((0, 1, 1, 0) if schedule == "zbv" else (0, 1, 0, 1))
    assert len(found.balance) == 4
    assert [need.total > 0 for need in found.predicted.bytes] == [True, True]
    assert found.timeline.makespan <= found.predicted.seconds.mid or found.notes[1].startswith("calibrated")
    assert Plan.from_json(found.to_json()) == found
    assert found.rank_arguments["ranks"] == list(found.placement)
    with pytest.raises(ValueError, match="devices: the plan is for 2 devices, got 1"):
        found.build(copy.deepcopy(plain), devices=["cpu:0"])
    with closing(found.build(copy.deepcopy(plain))) as pipe:
        pipe.step(x, y, loss_fn=loss, reduction="mean", **found.step_arguments)
        loss(plain(x), y).backward()
        assert_same(pipe, plain)
        shown = found.verify(x, y)
        assert len(shown.byte_ratios) == 2
        assert [0.5 < ratio < 2 for ratio in shown.byte_ratios] == [True, True]


def test_two_stages_per_device_are_planned_if_faster():
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    given = {"chunks": 8, "bandwidth": "1000GB", "latency": 0}
    one = plan(layers, torch.zeros(2**12, 4096, device="meta"), "4x8GB", schedule="1f1b", **given)
    found = plan(layers, torch.zeros(2**12, 4096, device="meta"), "4x8GB", **given)
    assert (len(one.balance), len(found.balance), found.devices) == (4, 8, one.devices)
    assert found.predicted.seconds.mid < 0.9 * one.predicted.seconds.mid
    assert [line.split()[1] for line in str(found).split("\n\n")[1].splitlines()[2:]] == ["0,", "1,", "2,", "3,"] * 2


def test_verify_compares_measured_with_predicted_figures():
    # The layer replaces its buffer in each call.
    counts = Layer(lambda s, x: (setattr(s, "calls", s.calls + 1), x)[1], calls=torch.zeros(()))
    plain, x, y = nn.Sequential(*linears(3), nn.BatchNorm1d(3, dtype=torch.float64), counts), rows(8), rows(8)
    given = {"target": y, "loss_fn": loss, "reduction": "mean"}
    found = plan(plain, x, CPUS, **given, chunks=[2, 4], schedule="1f1b", calibrate=False)
    with pytest.raises(ValueError, match=r"pipe: expected a pipe, but .* plan.build\(model\)"):
        found.verify(x, y)
    pipe = found.build(plain)
    pipe.step(x, y, loss_fn=loss, reduction="mean")
    before = copy.deepcopy(pipe.state_dict()), [parameter.grad.clone() for parameter in pipe.parameters()]
    with inline():
        shown = found.verify(x, y)
    after = pipe.state_dict(), [parameter.grad for parameter in pipe.parameters()]
    torch.testing.assert_close(dict(after[0]), dict(before[0]), rtol=0, atol=0)
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
    assert shown.seconds > 0
    assert shown.ratio == found.predicted.seconds.mid / shown.seconds
    assert [0.5 < ratio < 2 for ratio in shown.byte_ratios] == [True, True]
    assert len(shown.timeline.events) == 2 * 2 * found.chunks
    assert [line.split()[0] for line in str(shown).splitlines()[2:]] == ["a", "device", "device"]
    with pytest.raises(TypeError, match="got a target but no loss_fn"):
        Plan.from_json(found.to_json()).verify(x, y, pipe=pipe)
    with pytest.raises(ValueError, match="pipe: expected the planned balance"):
        found.verify(x, y, pipe=piped(linears(3), [3]))
    pipe.close()


@pytest.mark.parametrize(
    ("rows_of_x", "balance", "chunks", "net", "message"),
    [
        (8, [2, 2], 4, model(), "x: expected the planned 16 rows, got 8"),
        (ROWS, [1, 3], 4, model(), r"pipe: expected the planned balance \[2, 2\], got one with \[1, 3\]"),
        (ROWS, [2, 2], 2, model(), "pipe: expected the planned chunks 4, got one with 2"),
        (ROWS, [2, 2], 4, linears(4), r"pipe: expected the planned model, whose layer 0 is 'layer0' .* got '0'"),
    ],
)
def test_verify_rejects_unplanned_pipes_and_batches(
    rows_of_x: int, balance: list[int], chunks: int, net: nn.Sequential, message: str
) -> None:
    found = replace(made(chunks=4), sizes=(2, 2))
    with closing(piped(net, balance, chunks=chunks)) as pipe, pytest.raises(ValueError, match=message):
        found.verify(torch.zeros(rows_of_x, 3), loss_fn=lambda output, _: output.sum(), pipe=pipe)


def test_verify_needs_a_live_pipe() -> None:
    found = made(chunks=4)
    found.build(model())
    with pytest.raises(ValueError, match=r"pipe: expected a pipe, but .*keep the pipe that plan.build"):
        found.verify(torch.zeros(ROWS, 3))


def test_deferred_batch_norm_matches_the_planned_layer() -> None:
    layers, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), torch.randn(8, 3)
    found = plan(layers, x, CPUS, chunks=2, calibrate=False)
    with closing(found.build(layers, deferred_batch_norm=True)) as pipe:
        assert found.verify(x, loss_fn=lambda output, _: output.sum(), reduction="sum", pipe=pipe).seconds > 0


def test_predicted_bytes_per_kind_and_device(example: Plan) -> None:
    for need, room in zip(example.predicted.bytes, example.memory, strict=True):
        assert need.total == sum(need.by_kind.values()) <= room
        assert set(need.by_kind) == {"parameters", "gradients", "optimizer", "activations", "transient"}


def test_file_suffix_chooses_the_saved_format(example: Plan, tmp_path: Path) -> None:
    for ending in ("html", "json", "txt"):
        example.save(tmp_path / f"plan.{ending}")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<svg" in page
    again = Plan.from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert again == example
    assert (tmp_path / "plan.txt").read_text(encoding="utf-8") == f"{again}\n"
    with pytest.raises(ValueError, match=r"path: expected a name that ends in .html, .json or .txt, got .* '.pdf'"):
        example.save(tmp_path / "plan.pdf")
    assert not (tmp_path / "plan.pdf").exists()


WRONG = {"sizes": [3, 2], "modes": ["never"], "memory": [True, None], "schedule": "no", "placement": [0, 5], "rows": 0}
WRONG |= {"whole_loss": True}  # under 1F1B


@pytest.mark.parametrize(("name", "value"), [("sizes", []), ("sizes", [4]), *WRONG.items()])
def test_inconsistent_json_raises(example: Plan, name: str, value: Any) -> None:
    document = json.loads(example.to_json()) | {name: value}
    with pytest.raises(ValueError, match=r"plan.*: expected"):
        Plan.from_json(json.dumps(document))


def test_planned_recomputation_trains_like_the_model() -> None:
    """Memory is so short that one of the stages is recomputed."""
    free = made(chunks=8, schedule="1f1b")
    found = made(memory=int(0.85 * max(need.total for need in free.predicted.bytes)), chunks=8, schedule="1f1b")
    assert {*found.checkpoint} > {"never"}
    plain = model().double()
    with closing(found.build(copy.deepcopy(plain))) as pipe:
        assert pipe.checkpoint == found.checkpoint
        given = {"loss_fn": loss, "reduction": "mean"}
        pipe.step(rows(ROWS), rows(ROWS) * 2, **given, schedule=found.schedule)
        loss(plain(rows(ROWS)), rows(ROWS) * 2).backward()
        assert_same(pipe, plain)
        with inline():
            shown = found.verify(rows(ROWS), rows(ROWS), **given, pipe=pipe)
        assert len(shown.timeline.events) == len(found.timeline.events) == (2 * 2 + 1) * found.chunks
    assert Plan.from_json(found.to_json()) == found


def test_build_rejects_different_layers(example: Plan) -> None:
    layers = model()
    layers[1] = nn.Tanh()
    with pytest.raises(
        ValueError, match=r"planned model, whose layer 1 is 'layer1' \(Sequential, 12 .*got 'layer1' \(Tanh"
    ):
        example.build(layers)


def test_requested_settings_are_kept() -> None:
    found = made(chunks=4, schedule="fill_drain", checkpoint="always")
    assert (found.chunks, found.schedule, found.checkpoint) == (4, "fill_drain", ["always", "always"])
    assert found.alternatives == ()
    assert made(chunks=15).chunks == 8  # 16 rows split into 15 chunks give 8 micro-batches


def test_profile_of_one_size_requires_its_chunks() -> None:
    plain, x = linears(4), rows(8)
    known = profile(plain, x, device="cpu", chunks=4, timeout=0.01)
    assert plan(plain, x, CPUS, profile=known, chunks=4, calibrate=False).chunks == 4
    with pytest.raises(ValueError, match="this profile was measured only with 2 rows"):
        plan(plain, x, CPUS, profile=known, calibrate=False)
    with pytest.raises(Infeasible, match=r"what would fit: (?!.*chunks)"):
        plan(plain, x, CPUS, profile=known, chunks=4, memory=1, calibrate=False)


def test_model_with_custom_forward() -> None:
    net, x = Model(), torch.randn(8, 2)
    found = plan(net, x, CPUS, chunks=4, calibrate=False)
    assert "one step of the engine" in found.notes[-1]
    with closing(found.build(net)) as pipe:
        torch.testing.assert_close(pipe(x), net(x))
        assert check(pipe, x).findings == check(net, x).findings
        with pytest.raises(TypeError, match="model: expected a model, got a pipe"):
            plan(pipe, x, CPUS)


def test_plan_trains_a_model_in_evaluation_mode() -> None:
    seen = []
    net = nn.Sequential(*linears(2), Layer(lambda s, x: (seen.append(s.training), x * 1)[1])).eval()
    assert "calibrated" in plan(net, rows(8), CPUS, chunks=2).notes[1]
    assert {*seen} == {True}
    assert not any(module.training for module in net.modules())


def test_plan_logs_no_advice_on_tried_settings(caplog: pytest.LogCaptureFixture) -> None:
    plan(linears(3).eval(), rows(8), CPUS, chunks=1)
    assert not caplog.records


def test_stateful_loss_is_unchanged() -> None:
    head = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), Layer(lambda s, x: x.square().mean()))
    before = copy.deepcopy(head.state_dict())
    found = plan(linears(3), rows(8), CPUS, loss_fn=head, chunks=2)
    with closing(found.build(linears(3))) as pipe:
        found.verify(rows(8), pipe=pipe)
    torch.testing.assert_close(head.state_dict(), before)
    assert all(parameter.grad is None for parameter in head.parameters())


def test_replicated_mask_and_weighted_target() -> None:
    first, x, y = Layer(lambda s, given: given[0] * given[1].mean()), rows(8), {"y": rows(8), "w": 2.0}
    given = {"target": y, "loss_fn": lambda output, target: loss(output, target["y"]) * target["w"]}
    net, sample = nn.Sequential(first, *linears(2)), (x, Replicate(torch.ones(64, 64)))
    assert "one step of the engine" in plan(net, sample, CPUS, calibrate=False, **given).notes[-1]
    assert check(net, sample, **given).ok


def test_dry_run_supports_parametrized_layers() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(linears(1)[0]), *linears(1))
    assert "one step of the engine" in plan(net, rows(8), CPUS, chunks=2, calibrate=False).notes[-1]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_is_supported_under_no_grad() -> None:
    net, x = nn.Sequential(nn.utils.weight_norm(linears(1)[0]), *linears(1)), rows(8)
    net(x)
    with torch.no_grad():
        assert plan(net, x, CPUS, chunks=2).balance == [1, 1]
        assert check(net, x).ok


@pytest.mark.parametrize("devices", [CPUS, "2x1GB"])
@pytest.mark.parametrize(
    "loss_fn", [lambda output: output.mean(), lambda output: (LossSum(output.sum(), 3), {"most": output.max()})]
)
def test_loss_without_target(devices: Any, loss_fn: Any) -> None:
    found = plan(linears(2), rows(4), devices, loss_fn=loss_fn, chunks=2, calibrate=devices is CPUS)
    assert found.balance == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": 3}, TypeError, "Sequential|module"),
        ({"model": nn.Sequential()}, ValueError, "model: expected at least one layer, got none"),
        ({"model": nn.Sequential(*[nn.Linear(3, 3)] * 2)}, ValueError, "duplicate .*: '1' is the same layer as '0'"),
        ({"devices": []}, ValueError, "devices: expected at least one, got none"),
        ({"devices": ["gpu"]}, ValueError, "'gpu', which cannot be used here"),
        ({"devices": "cpu"}, TypeError, "devices must be a list"),
        ({"devices": ["meta"]}, ValueError, "devices: 'meta' cannot run a model; .* text such as '8x80GB'"),
        ({"devices": ["cpu:0", "cpu:0"]}, ValueError, "devices: expected each device once, got cpu:0, cpu:0"),
        ({"memory": "lots"}, ValueError, "memory: expected bytes"),
        ({"memory": ["1GB"]}, ValueError, r"memory: expected one size, or one per device \(2\), got 1"),
        ({"memory": {"cpu": 1}}, TypeError, "memory must be a size"),
        ({"chunks": 0}, ValueError, "number of chunks must be positive"),
        ({"chunks": [4, 17]}, ValueError, r"chunks: expected numbers from 1 to 16.*got \[4, 17\]"),
        ({"chunks": "4"}, TypeError, "chunks must be a number"),
        ({"schedule": "1f2b"}, ValueError, "unknown schedule '1f2b'; choose one of"),
        (
            {"schedule": "interleaved"},
            ValueError,
            r"schedule: 'interleaved' runs 2 stages .*such as \['cpu:0', 'cpu:1'\]",
        ),
        ({"schedule": 3}, TypeError, "schedule"),
        ({"checkpoint": "sometimes"}, ValueError, "checkpoint is not one of"),
        ({"optimizer": "adamm"}, ValueError, "optimizer: expected one of .*'adam'"),
        ({"optimizer": -1}, ValueError, "optimizer: expected a finite, non-negative number of bytes per parameter"),
        ({"optimizer": None}, TypeError, "optimizer: expected a name such as 'adamw'"),
        ({"calibrate": "no"}, TypeError, "calibrate must be True or False"),
        ({"target": torch.zeros(ROWS, 3)}, TypeError, "got a target but no loss_fn"),
        ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function"),
        ({"reduction": "none"}, ValueError, "reduction must be 'mean', 'sum' or None"),
        ({"target": torch.zeros(3, 3), "loss_fn": loss}, ValueError, "target has 3 rows .*, but the input has 16 rows"),
        ({"chunks": True}, TypeError, "chunks must be an int"),
        ({"profile": 3}, TypeError, "profile: expected a profiler.Profile, got int"),
        ({"profile": replace(KNOWN, rounds=0)}, ValueError, "profile: expected a profile with seconds"),
    ],
)
def test_invalid_arguments_raise_before_anything_is_measured(
    wrong: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gpipe._plan._make.measure", None)
    with pytest.raises(error, match=message):
        made(**wrong)


def test_devices_of_several_types_raise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpipe._plan._request.check_devices", lambda devices, _: [*map(torch.device, devices)])
    with pytest.raises(ValueError, match="devices: expected devices of one type, got cpu, cuda"):
        made(devices=["cpu", "cuda"])


def test_verify_supports_expanded_buffers() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("scale", torch.ones(1).expand(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    x, model = torch.zeros(8, 8), nn.Sequential(Scaled(), Scaled())
    found = plan(model, x, ["cpu"] * 2, loss_fn=torch.sum, reduction="sum", chunks=2, calibrate=False)
    pipe = found.build(model)
    assert found.verify(x, pipe=pipe).seconds > 0
