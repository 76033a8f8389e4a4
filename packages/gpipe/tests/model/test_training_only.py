"""Training-only behavior and side effects of a forward match the model, or raise."""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import Layer, gradients

WIDTH, ROWS = 4, 6


def block(s: Layer, x: Tensor, scale: float = 1.0) -> Tensor:
    s.kept = found = (s.m[0](x) + s.shift).tanh() * scale
    return found


class Told(nn.Module):
    """Its forward is given; it has a little of everything."""

    def __init__(self, told: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks = nn.ModuleList(Layer(block, nn.Linear(WIDTH, WIDTH), shift=0.0) for _ in range(3))
        self.extra = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(WIDTH, 3)
        self.calls = 0
        self.told = told

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.told(self, x, scale)

    def through(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, scale)
        return hidden


def plain(model: Told, x: Tensor, scale: float) -> Tensor:
    return model.head(model.through(model.embed(x), scale))


def parameter_at_the_end(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.through(model.embed(x))
    return model.head(hidden * model.extra if model.training else hidden)


def parameter_at_both_ends(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    hidden = model.through(hidden + model.extra if model.training else hidden)
    return model.head(hidden * model.extra)


def output_used_again(model: Told, x: Tensor, scale: float) -> Tensor:
    first = model.embed(x)
    hidden = model.through(first)
    return model.head(hidden + first if model.training else hidden)


def codes_in_training(model: Told, x: Tensor, scale: float) -> Tensor:
    first = model.embed(x)
    found = model.head(model.through(first))
    return found.gather(1, (first.argmax(1) % 3)[:, None]) if model.training else found[:, :1]


def buffer_at_the_start(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    if model.training:
        model.mean.add_(hidden.detach().mean(0))
        model.count += 1
    return model.head(model.through(hidden))


def buffer_at_the_end(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.through(model.embed(x))
    if model.training:
        model.mean.add_(hidden.detach().mean(0))
    return model.head(hidden - model.mean)


def between_blocks(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    for block in model.blocks:
        hidden = hidden + block(hidden).relu() if model.training else block(hidden)
    return model.head(hidden)


def noise_in_a_module(model: Told, x: Tensor, scale: float) -> Tensor:
    return model.head(model.through(nn.functional.dropout(model.embed(x), 0.0, model.training)))


def norm_at_the_start(model: Told, x: Tensor, scale: float) -> Tensor:
    return model.head(model.through(model.norm(model.embed(x))))


EQUAL = [
    plain,
    norm_at_the_start,
    parameter_at_the_end,
    parameter_at_both_ends,
    output_used_again,
    codes_in_training,
    between_blocks,
    buffer_at_the_start,
    buffer_at_the_end,
    noise_in_a_module,
]


def made(told: Callable[..., Tensor], seed: int = 0) -> Told:
    torch.manual_seed(seed)
    return Told(told).double()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def piped(model: nn.Module, checkpoint: str = "never") -> GPipe:
    return GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)


def by_micro_batch(model: nn.Module) -> None:
    for part in batch().chunk(2):
        model(part).square().mean().div(2).backward()


@pytest.mark.parametrize("told", EQUAL, ids=lambda told: told.__name__)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_training_only_behavior_matches_model(told: Callable[..., Tensor], checkpoint: str):
    model = made(told)
    expected = copy.deepcopy(model)
    by_micro_batch(expected)
    with closing(piped(model, checkpoint)) as pipe:
        pipe.step(batch(), loss_fn=lambda output: output.square().mean(), reduction="mean")
    torch.testing.assert_close(gradients(model), gradients(expected))
    torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))


def without_gradients(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    with torch.no_grad():
        hidden = model.through(hidden)
    return model.head(hidden)


def in_another_precision_in_training(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=model.training):
        hidden = model.through(hidden)
    return model.head(hidden.to(x.dtype))


def noise(model: Told, x: Tensor, scale: float) -> Tensor:
    drawn = torch.randn_like(x) if model.training else torch.zeros_like(x)
    return model.head(model.through(model.embed(x + drawn))) - drawn.sum(1, keepdim=True)


def dropped(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    for block in model.blocks[1:] if model.training else model.blocks:
        hidden = block(hidden)
    return model.head(hidden)


def replaced(model: Told, x: Tensor, scale: float) -> Tensor:
    model.count = model.count + 1
    return model.head(model.through(model.embed(x)))


def kept_by_a_block(model: Told, x: Tensor, scale: float) -> Tensor:
    """Use losses stored by blocks, like the balancing losses of experts."""
    found = plain(model, x, scale)
    for block in model.blocks:
        found = found + block.kept.mean()
    return found


def told_to_a_block(model: Told, x: Tensor, scale: float) -> Tensor:
    model.blocks[1].shift = x.mean()
    return plain(model, x, scale)


def penalty(model: Told, x: Tensor, scale: float) -> Tensor:
    found = plain(model, x, scale)
    return found + sum(p.square().sum() for p in model.parameters()) if model.training else found


def penalty_of_blocks(model: Told, x: Tensor, scale: float) -> Tensor:
    found = plain(model, x, scale)
    return found + sum(p.sum() for _, p in model.blocks.named_parameters()) if model.training else found


def counted_tensors(model: Told, x: Tensor, scale: float) -> Tensor:
    return plain(model, x, scale) * (len(model.state_dict()) if model.training else 1)


ALSO_EQUAL = [
    penalty,
    penalty_of_blocks,
    counted_tensors,
    without_gradients,
    in_another_precision_in_training,
    replaced,
    dropped,
    *[told for told in EQUAL if told is not norm_at_the_start and not told.__name__.startswith("buffer")],
]


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("told", ALSO_EQUAL, ids=lambda told: told.__name__)
@pytest.mark.parametrize("reduction", ["mean", None])
def test_using_all_parameters_or_modes_matches_model(told: Callable[..., Tensor], reduction: str | None) -> None:
    model = made(told)
    expected = copy.deepcopy(model)
    by_micro_batch(expected) if reduction else loss_of(expected(batch())).backward()
    with closing(piped(model, "always")) as pipe:
        pipe.step(batch(), loss_fn=loss_of, reduction=reduction)
    torch.testing.assert_close(gradients(model), gradients(expected))


def overlap(model: Told) -> None:
    """Let the last block of the first micro-batch wait until the first block has computed the second one."""
    calls, is_at_second = count(), Event()
    model.blocks[0].register_forward_hook(lambda *_: is_at_second.set() if next(calls) else None)

    def wait(*_: Any) -> None:
        assert is_at_second.wait(60)

    model.blocks[-1].register_forward_hook(wait)


REFUSED = {
    noise: r"draws random numbers",
    kept_by_a_block: r"reads blocks\.0\.kept, where a block has left a tensor",
    told_to_a_block: r"sets blocks\.1\.shift, an attribute of a block, to a tensor.*call the block with it",
}


@pytest.mark.parametrize("told", list(REFUSED), ids=lambda told: told.__name__)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_what_would_differ_silently_is_refused_by_name(told: Callable[..., Tensor], method: str) -> None:
    model = made(told)
    overlap(model)
    with closing(piped(model)) as pipe, pytest.raises(RuntimeError, match=REFUSED[told]):
        getattr(pipe, method)(batch(), loss_fn=loss_of)


def test_permanent_tensor_on_block_is_allowed() -> None:
    model = made(plain)
    model.blocks[1].shift = torch.full((WIDTH,), 0.5, dtype=torch.float64)
    expected = copy.deepcopy(model)
    with closing(piped(model)) as pipe:
        torch.testing.assert_close(pipe(batch()), expected(batch()))
        model.blocks[1].shift = expected.blocks[1].shift = torch.ones(WIDTH, dtype=torch.float64)
        torch.testing.assert_close(pipe(batch()), expected(batch()))


def remembers(s: Layer, x: Tensor) -> Tensor:
    """Returns the same table in every call, which it keeps."""
    s.table = torch.ones(WIDTH, dtype=torch.float64) if s.table is None else s.table
    return s.m[0](x), s.table


def test_stored_and_returned_tensor_is_allowed() -> None:
    def told(model: Told, x: Tensor, scale: float) -> Tensor:
        hidden = model.embed(x)
        for block in model.blocks:
            hidden, table = block(hidden)
            hidden = hidden * table
        return model.head(hidden)

    model = made(told)
    model.blocks = nn.ModuleList(Layer(remembers, nn.Linear(WIDTH, WIDTH), table=None).double() for _ in range(3))
    expected = copy.deepcopy(model)
    with closing(piped(model)) as pipe:
        for _ in range(2):
            found = pipe.step(batch(), loss_fn=loss_of, reduction="mean")
            torch.testing.assert_close(found, loss_of(expected(batch())).detach())


def test_layer_drop_is_per_micro_batch_or_raises() -> None:
    def told(model: Told, x: Tensor, scale: float) -> Tensor:
        hidden = model.embed(x)
        for block in model.blocks:
            if not (model.training and torch.rand([]) < 0.5):
                hidden = block(hidden)
        return model.head(hidden)

    torch.manual_seed(0)
    with closing(piped(made(told), "always")) as pipe:
        for _ in range(4):
            assert pipe.step(batch(), loss_fn=loss_of, reduction="mean").isfinite()
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="different blocks"):
            pipe.step(batch(), loss_fn=loss_of)


def changes(model: Told, x: Tensor, scale: float) -> Tensor:
    """In evaluation too."""
    model.norm.num_batches_tracked = model.norm.num_batches_tracked + 1
    model.history = [*getattr(model, "history", []), 1]
    return plain(model, x, scale)


def normed(model: Told, x: Tensor, scale: float) -> Tensor:
    """Use batch norm, which updates its statistics without a new version."""
    return plain(model, model.norm(model.embed(x)) @ model.embed.weight, scale)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    def state() -> list[Any]:
        return [
            {name: value for name, value in vars(module).items() if not name.startswith("_")}
            | {name: tensor.clone() for name, tensor in module.named_buffers()}
            | {"hooks": [*module._forward_hooks, *module._forward_pre_hooks]}
            for module in model.modules()
        ]

    before, random = state(), torch.get_rng_state()
    yield
    assert str(state()) == str(before)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("told", [*EQUAL, changes, normed], ids=lambda told: told.__name__)
def test_creating_a_pipe_does_not_change_model(told: Callable[..., Tensor]):
    model = made(told)
    with unchanged(model):
        piped(model).close()


class Halved(nn.Module):
    """Calls its blocks with halves of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.func.functional_call(block, {"weight": block.weight * 0.5}, (x,)).tanh()
        return x


@pytest.mark.parametrize("trains", [True, False])
def test_temporary_tensors_on_blocks_match_or_raise(trains: bool) -> None:
    model, x = Halved(), torch.randn(12, 4)
    before, expected = [*model.parameters()], model(x).square().sum()
    for stages in (1, 3):
        with closing(GPipe(model, devices=["cpu"] * stages, chunks=6, checkpoint="never")) as pipe:
            method = pipe.step if trains else pipe.evaluate
            if stages == 1:
                loss = method(x, loss_fn=lambda output: output.square().sum(), reduction="sum")
                torch.testing.assert_close(loss, expected.detach())
                continue
            with pytest.raises(RuntimeError, match=r"block 'blocks\.\d' is called with different tensors"):
                method(x, loss_fn=lambda output: output.square().sum(), reduction="sum")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
