"""Plans of models with a custom forward, whose layers are blocks, measured during the model's forward."""

import copy
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import Arguments, LossSum, Plan, inline, plan, record
from gpipe._plan._blocks import Training, profile_blocks
from gpipe._plan._loss import StepLoss
from gpipe._plan._planned import find_layers
from profiler import LayerProfile, Profile, profile

from ..layers import assert_same
from ..model.test_loss_of_model import Model as WithLoss
from ..model.test_loss_of_model import contrast, scaled_by_items

CPUS, WIDTH, ROWS = ["cpu", "cpu"], 24, 32
META, CPU = torch.device("meta"), torch.device("cpu")
BYTES = ("trainable_bytes", "frozen_bytes", "buffer_bytes", "largest_parameter_bytes", "flops")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """A model with blocks between other layers.

    Args:
        length: the number of blocks.
        calls: the number of calls of each block.
        mixes: whether all blocks also use a value that is computed before the first one.
        tied: whether the first and the last layer share their weight.
    """

    def __init__(self, length: int = 4, calls: int = 1, mixes: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(length))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.first.weight
        self.calls, self.mixes = calls, mixes

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or mask.all()
        x = self.first(x)
        scale = x.mean(-1, keepdim=True).tanh() if self.mixes else None
        for block in self.blocks:
            for _ in range(self.calls):
                x = block(x, scale)
        found: Tensor = self.last(self.norm(x))
        return found


class InARow(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


def root(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean().sqrt()


def measured(model: nn.Module, x: Any, device: torch.device, loss: StepLoss | None = None) -> tuple[Profile, bool]:
    found = find_layers(model, x, lambda most: 2)
    training = Training(found, Arguments((x,), {}), None, loss or StepLoss(squares, "mean"))
    return profile_blocks(training, [device] * len(found.layers), [4, 8], 0.01)


nets = st.builds(Net, st.integers(2, 4), st.integers(1, 2), st.booleans(), st.booleans())


@settings(max_examples=min(6, settings.default.max_examples // 3), suppress_health_check=[HealthCheck.too_slow])
@given(nets, st.sampled_from([squares, partial(torch.mean)]), st.sampled_from([None, "mean"]), st.sampled_from([1, 3]))
def test_planned_pipe_trains_like_the_model(net, loss_fn, reduction, chunks) -> None:
    """Its bytes match the plan."""
    x = torch.randn(ROWS, WIDTH)
    plain, loss = copy.deepcopy(net), {"loss_fn": loss_fn, "reduction": reduction}
    found = plan(net, x, CPUS, **loss, chunks=chunks, calibrate=False)
    assert "one step of the engine" in found.notes[-1]
    assert found.own_forward
    assert found.whole_loss == (reduction is None)
    with closing(found.build(net)) as pipe:
        assert (pipe.balance, pipe.block_names) == (found.balance, [key.name for key in found.layers])
        value = pipe.step(x, **loss, **found.step_arguments)
        expected = loss_fn(plain(x))
        expected.backward()
        torch.testing.assert_close(value, expected.detach())
        assert_same(pipe, plain)
        with inline():
            assert found.verify(x).byte_ratios == pytest.approx([1, 1], rel=0.25)


@settings(max_examples=min(4, settings.default.max_examples // 3))
@given(nets)
def test_same_costs_are_counted_on_meta(net: Net) -> None:
    x = torch.randn(ROWS, WIDTH)
    (fake, _), (real, _) = (measured(copy.deepcopy(net), x, device) for device in (META, CPU))
    assert [one.rows for one in (*fake.others, fake)] == [one.rows for one in (*real.others, real)] == [4, 8]
    for name in (*BYTES, "saved_bytes", "output_bytes"):
        assert fake.costs(name) == real.costs(name), name
    assert all(layer.seconds is None for layer in fake)
    assert all(layer.forward_seconds > 0 for layer in real)


def test_blocks_cost_as_much_as_sequential_layers() -> None:
    layers, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(ROWS, WIDTH)
    expected = profile(layers, x, device="meta", rows=[4, 8], loss_fn=lambda output, _: squares(output))
    found, _ = measured(InARow(layers), x, META)
    assert found.names == [f"layers.{k}" for k in range(3)]
    for name in (*BYTES, "output_bytes"):
        assert found.costs(name) == expected.costs(name), name
    # The last block also saves tensors for the loss.
    assert found.costs("saved_bytes")[:2] == expected.costs("saved_bytes")[:2]


def test_blocks_include_repeated_calls_and_surrounding_layers() -> None:
    """A block counts once per call. The layers around the blocks count for the first and the last block."""
    x = torch.randn(ROWS, WIDTH)
    once, twice = (measured(Net(3, calls), x, META)[0] for calls in (1, 2))
    first, block, last = (layer.flops for layer in once)
    assert (first, last) == (block + layer_flops(2), block + layer_flops(3))
    assert [layer.flops for layer in twice] == [first + block, 2 * block, last + block]
    assert twice[1].saved_bytes > once[1].saved_bytes
    assert once[0].trainable_bytes == once[1].trainable_bytes + WIDTH * (WIDTH + 1) * 4


def layer_flops(products: int) -> int:
    """Return the FLOPs of a linear layer with two or three matrix products: the input may need no gradient."""
    return 2 * products * 8 * WIDTH * WIDTH


def test_profile_of_blocks_replaces_measurement() -> None:
    net, x = Net(), torch.randn(ROWS, WIDTH)
    known, _ = measured(net, x, CPU)
    slow = LayerProfile(**{**vars(known[0]), "forward_seconds": 100.0, "backward_seconds": 100.0})
    one = Profile(**{**vars(known), "layers": (slow, *known.layers[1:]), "others": (), "rows": 8})
    found = plan(net, x, CPUS, profile=one, loss_fn=squares, chunks=4, calibrate=False)
    assert (found.balance, found.whole_loss) == ([1, 3], True)
    assert not plan(net, x, CPUS, profile=one, loss_fn=squares, reduction="mean", chunks=4, calibrate=False).whole_loss
    with pytest.raises(ValueError, match="profile: expected a profile of these 3 layers"):
        plan(Net(3), x, CPUS, profile=one, calibrate=False)


def test_combination_of_model_losses_is_detected_despite_profile() -> None:
    inputs = Arguments((), {"tokens": torch.randint(7, (8, 5)), "labels": torch.randint(7, (8, 5))})
    for loss, whole in ((contrast, True), (scaled_by_items, False)):
        model = WithLoss(loss, torch.float32)
        found = find_layers(model, inputs, lambda most: 2)
        given = Training(found, inputs, None, StepLoss(own="Model"))
        known, _ = profile_blocks(given, [CPU] * len(found.layers), [2], 0.01)
        assert plan(model, inputs, CPUS, profile=known, chunks=4, calibrate=False).whole_loss == whole


def count(output: Tensor) -> Any:
    return LossSum(output.square().sum(), output.numel())


@pytest.mark.parametrize("devices", [CPUS, "2x1GB"])
def test_loss_fn_that_returned_sums_is_combined(devices: Any) -> None:
    found = plan(Net(), torch.randn(ROWS, WIDTH), devices, loss_fn=count, chunks=4, calibrate=False)
    assert not found.whole_loss


@pytest.mark.one_in(2)
@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize(
    ("loss", "reduction", "whole"),
    [(contrast, None, True), (scaled_by_items, None, False), (scaled_by_items, "mean", False)],
)
def test_loss_of_the_model_itself(
    loss: Callable[..., Tensor], reduction: str | None, whole: bool, calibrate: bool
) -> None:
    """It is computed per micro-batch with ``num_items_in_batch`` or an explicit ``reduction``, and otherwise once."""
    torch.manual_seed(0)
    plain = WithLoss(loss, torch.float32)
    inputs = {"tokens": torch.randint(7, (8, 5)), "labels": torch.randint(7, (8, 5))}
    found = plan(plain, inputs, CPUS, reduction=reduction, chunks=4, calibrate=calibrate)
    assert found.whole_loss == whole
    assert "one step of the engine" in found.notes[-1]
    with closing(found.build(copy.deepcopy(plain))) as pipe:
        value = pipe.step(**inputs, reduction=reduction, **found.step_arguments)
        torch.testing.assert_close(value, plain(**inputs)["loss"].detach())
        with inline():
            assert found.verify(inputs).byte_ratios == pytest.approx([1, 1], rel=0.15)
    if whole:
        with pytest.raises(ValueError, match=r"Model computes a loss, .*schedule='1f1b' starts backwards"):
            plan(plain, inputs, CPUS, chunks=4, schedule="1f1b", calibrate=False)


def test_model_on_meta() -> None:
    x, real = torch.randn(ROWS, WIDTH), Net()
    given = {"loss_fn": squares, "chunks": 4}
    with torch.device("meta"):
        blank = Net()
    found = plan(blank, {"x": x, "mask": torch.ones(ROWS, dtype=torch.bool)}, "2x1GB", **given)
    assert (found.is_estimate, found.balance) == (True, plan(real, x, "2x1GB", **given).balance)
    assert all(parameter.is_meta for parameter in blank.parameters())
    with pytest.raises(ValueError, match=r"plan runs the model, which is on 'meta' and has no data"):
        plan(blank, x, CPUS)


@pytest.fixture(scope="module")
def of_a_net() -> Plan:
    return plan(Net(), torch.randn(ROWS, WIDTH), CPUS, chunks=2, calibrate=False)


def test_saved_plan_builds_without_its_sample(of_a_net: Plan) -> None:
    """Its arguments for ranks name the blocks."""
    found = Plan.from_json(of_a_net.to_json())
    assert found.rank_arguments["blocks"] == [f"blocks.{k}" for k in range(4)]
    with closing(found.build(Net())) as pipe:
        assert pipe.balance == found.balance


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "planned model, a model with its own forward; got a Sequential"),
        (lambda: Net(3), "expected the planned model, with 4 layers; got one with 3"),
        (lambda: WithLoss(contrast), "expected the planned model, with 4 layers; got one with 0"),
    ],
)
def test_build_rejects_different_models(other: Callable[[], nn.Module], message: str, of_a_net: Plan) -> None:
    with pytest.raises(ValueError, match=message):
        of_a_net.build(other())


def test_plan_of_sequential_rejects_model_with_forward() -> None:
    found = plan(nn.Sequential(Block(), Block()), torch.randn(ROWS, WIDTH), CPUS, chunks=2, calibrate=False)
    with pytest.raises(ValueError, match=r"expected the planned model, an nn\.Sequential; got a Net"):
        found.build(Net())


def test_plan_changes_neither_model_nor_rng_state() -> None:
    net, x = Net().eval(), torch.randn(ROWS, WIDTH)
    net.register_buffer("seen", torch.zeros(()))
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    plan(net, x, CPUS, chunks=2, loss_fn=squares, calibrate=False)
    torch.testing.assert_close(net.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    assert all(parameter.grad is None for parameter in net.parameters())


def test_recording_counts_allocations_of_a_custom_forward() -> None:
    """The forward runs on a separate thread."""
    net, x = Net(2), torch.randn(ROWS, WIDTH)
    found = plan(net, x, CPUS, chunks=2, checkpoint="never", calibrate=False)
    with closing(found.build(net)) as pipe, record(memory=True) as timeline:
        pipe.step(x, loss_fn=squares, reduction="mean")
    assert all(size >= ROWS // 2 * 4 * WIDTH * 4 for size in timeline.peak_bytes.values())


class WithAList(nn.Module):
    """A model with recurrent layers, whose kernels save memory of a size that fake tensors do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_memory_size_unknown_to_fake_tensors_is_measured() -> None:
    x = torch.randn(16, 5, WIDTH)
    fake, real = (measured(WithAList(), x, device)[0] for device in (META, CPU))
    assert fake.costs("saved_bytes") == real.costs("saved_bytes")


class Looks(Net):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found = super().forward(x)
        return found if found.sum() > 0 else -found


def test_model_that_reads_tensor_values() -> None:
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(RuntimeError) as caught:
        plan(Looks(), x, "2x1GB", loss_fn=squares)
    assert "Looks ran on fake tensors, since the devices are hypothetical" in "".join(caught.value.__notes__)
    assert "layers alone" in plan(Looks(), x, CPUS, loss_fn=squares, chunks=2, calibrate=False).notes[-1]
