"""``accelerate.prepare(pipe)`` leaves a pipe where it is, and trains it as it trains the plain model."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pipelined import pipelined
from .processes import X, Y, expect_equal_in_two, network, piped

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; see nox -s frameworks")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    _fresh_state()


def _fresh_state() -> None:
    """Reset the state shared by all accelerators of a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def trained(model: nn.Module, **options: Any) -> tuple[list[float], nn.Module]:
    """The losses of some steps, and the model as it is afterwards."""
    accelerator = accelerate.Accelerator(cpu=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(prepared):
            output = prepared(x)
            assert output.dtype == torch.float32
            loss = F.cross_entropy(output, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 1, 2]])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_it_trains_as_the_plain_model(balance: list[int], steps: int, checkpoint: str) -> None:
    model = network()
    pipe = piped(balance, checkpoint=checkpoint)
    with pipelined(pipe, 2):
        losses, unwrapped = trained(pipe, gradient_accumulation_steps=steps)
    _fresh_state()
    expected, _ = trained(model, gradient_accumulation_steps=steps)
    assert unwrapped is pipe
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(state(pipe), state(model))


def test_mixed_precision() -> None:
    """Its autocast is around the forward: layers see it, in recomputations too, and the output is float32."""
    model = network()
    seen = set()

    def see(module: nn.Module, inputs: Any) -> None:
        seen.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)

    pipe = piped([2, 3], checkpoint="always")
    pipe[2].register_forward_pre_hook(see)
    with pipelined(pipe, 2):
        losses, _ = trained(pipe, mixed_precision="bf16")
    _fresh_state()
    expected, _ = trained(model, mixed_precision="bf16")
    assert seen == {torch.bfloat16}
    assert losses == pytest.approx(expected, rel=1e-2)


def parallel() -> None:
    """Run one of two processes, with its own rows."""
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    pipe = piped([2, 3])
    own = slice(accelerator.process_index, None, 2)
    for each in (pipe, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        prepared, optimizer = accelerator.prepare(each, optimizer)
        assert isinstance(prepared, nn.parallel.DistributedDataParallel)
        with pipelined(pipe, 4) if each is pipe else nullcontext():
            for _ in range(2):
                accelerator.backward(F.cross_entropy(prepared(X[own]), Y[own]))
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(state(pipe), state(model))
    print("equal", flush=True)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_processes() -> None:
    """Refused for any model with a device map, unless the environment says otherwise."""
    environment = {"ACCELERATE_BYPASS_DEVICE_MAP": "true", "ACCELERATE_USE_CPU": "true"}
    expect_equal_in_two(f"from {__name__} import parallel; parallel()", **environment)
