"""Predicted bytes against those that storages take, counted one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe._plan._arguments import optimizer_bytes, read_bytes
from gpipe._plan._costs import Costs, Measured
from gpipe._plan._measure import measure
from gpipe._plan._verify import peak_bytes
from gpipe.schedule import zero_bubble
from profiler import profile

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

CHUNKS, STAGES = 6, 2
MODES = [["never", "never"], ["always", "always"], ["always", "never"], ["except_last", "except_last"]]
WIDTH = 48


def wide() -> nn.Sequential:
    """Blocks whose gradients are as large as their activations."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def tall() -> nn.Sequential:
    """Hardly any parameters, and a large output."""
    return nn.Sequential(
        *[make() for _ in range(3) for make in (lambda: nn.LayerNorm(WIDTH), nn.GELU)],
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
    )


def loss(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def costs_of(model: nn.Sequential, x: Tensor) -> Costs:
    found = profile(model, x, device="cpu", rows=[8, 16], loss_fn=loss, timeout=1e-3)
    bare = Measured(
        (found,) * STAGES, (0,) * len(model), len(x), x.nbytes, False, x.requires_grad, (False,) * STAGES, ()
    )
    return bare.cut(CHUNKS)


@pytest.mark.parametrize("make", [wide, tall])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain", "zero_bubble"])
def test_each_stage_takes_what_is_predicted(make: Callable[[], nn.Sequential], modes: list[str], schedule: str):
    """Never much less, which would run out of memory; more, by two fifths at most, where peaks do not meet."""
    model, x = make(), torch.randn(16 * CHUNKS, WIDTH)
    balance = [len(model) // 2, len(model) - len(model) // 2]
    split = [1] if schedule == "zero_bubble" else []
    predicted = costs_of(model, x).device_bytes(balance, modes, schedule, split)
    pipe = GPipe(model, balance, devices=["cpu"] * STAGES, chunks=CHUNKS, checkpoint=modes)
    pipe.step(x, loss_fn=loss)  # the first step is special: it finds out what layers do
    with inline():
        found = peak_bytes(pipe, x, None, loss, zero_bubble(CHUNKS, STAGES, split=split) if split else schedule)
    for need, true in zip(predicted, found, strict=True):
        assert 0.95 <= need.total / true <= 1.4, (need, true)


def test_measuring_leaves_the_model_alone():
    model, x = wide(), torch.randn(8, WIDTH)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure(
        model, x, [torch.device("cpu")] * 2, [1, 2, 8], target=None, loss_fn=loss, optimizer=[0] * 8, known=None
    )
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.rows == 8
    assert [each.rows for each in (*found.profiles[0].others, found.profiles[0])] == [1, 4]
    assert found.action > 0


@pytest.mark.parametrize(
    ("optimizer", "times"),
    [("sgd", 0), ("adam", 2), ("AdamW", 2), (8, 2), (torch.optim.SGD, 0), (lambda p: torch.optim.SGD(p, 1, 0.9), 1)],
)
def test_what_an_optimizer_keeps(optimizer: object, times: int):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False))
    assert optimizer_bytes(optimizer, model) == [times * 20 * 4, 0, 0]


def test_the_optimizers_of_torch_keep_what_their_names_say():
    model = nn.Sequential(nn.Linear(64, 64))
    for name in ("Adagrad", "RMSprop", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"):
        (tried,) = optimizer_bytes(getattr(torch.optim, name), model)
        (known,) = optimizer_bytes(name, model)
        assert known <= tried <= known + 32  # counts of steps


def test_shared_parameters_count_once():
    layer = nn.Linear(4, 4)
    assert optimizer_bytes("adam", nn.Sequential(layer, nn.Sequential(layer))) == [160, 0]


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("1.5mb", 1_500_000), ("512", 512), (".5KiB", 512), (7.0, 7)],
)
def test_sizes_as_text(text: str | float, size: int):
    assert read_bytes(text) == size


@pytest.mark.parametrize("wrong", ["lots", "80 GBs", "", "GB", "-1GB", "0GB", "1e400GB", "nan", 0, -5])
def test_no_sizes(wrong: str | int):
    with pytest.raises(ValueError, match=r"memory: expected bytes, such as 8_000_000_000, '80GB' .*; got"):
        read_bytes(wrong)


@pytest.mark.parametrize("wrong", [True, None, [1]])
def test_sizes_of_another_type(wrong: object):
    with pytest.raises(TypeError, match="memory: expected bytes"):
        read_bytes(wrong)
