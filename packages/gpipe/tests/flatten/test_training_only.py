"""What a forward does in training, or beside computing, is as in the model, or refused by name."""

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, flatten

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
    layers = flatten(model, batch(3))
    return GPipe(layers, [2, len(layers) - 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)


def by_micro_batch(model: nn.Module) -> None:
    for part in batch().chunk(2):
        model(part).square().mean().div(2).backward()


@pytest.mark.parametrize("told", EQUAL, ids=lambda told: told.__name__)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_happens_in_training_only_is_as_in_the_model(told: Callable[..., Tensor], checkpoint: str):
    model = made(told)
    expected = copy.deepcopy(model)
    by_micro_batch(expected)
    with closing(piped(model, checkpoint)) as pipe:
        pipe.step(batch(), loss_fn=lambda output: output.square().mean())
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


def buffer_at_both_ends(model: Told, x: Tensor, scale: float) -> Tensor:
    hidden = model.embed(x)
    if model.training:
        model.mean.add_(hidden.detach().mean(0))
    return model.head(model.through(hidden) - model.mean)


def norm_at_both_ends(model: Told, x: Tensor, scale: float) -> Tensor:
    return model.head(model.norm(model.through(model.norm(model.embed(x)))))


def counter(model: Told, x: Tensor, scale: float) -> Tensor:
    if model.training:
        model.calls += 1
    return model.head(model.through(model.embed(x))) * (1 + model.calls)


def replaced(model: Told, x: Tensor, scale: float) -> Tensor:
    model.count = model.count + 1
    return model.head(model.through(model.embed(x)))


def kept_by_a_block(model: Told, x: Tensor, scale: float) -> Tensor:
    """As models of experts keep losses that balance them."""
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


def kept_by_modules(model: Told, x: Tensor, scale: float) -> Tensor:
    found = plain(model, x, scale)
    kept = [each.kept.mean() for each in model.modules() if isinstance(each, Layer)] if model.training else []
    return found + sum(kept)


def counted_tensors(model: Told, x: Tensor, scale: float) -> Tensor:
    return plain(model, x, scale) * (len(model.state_dict()) if model.training else 1)


REFUSED = {
    penalty: r"goes over all modules, parameters or buffers of a Told.*loss_fn",
    penalty_of_blocks: r"goes over all modules, parameters or buffers of a ModuleList",
    kept_by_modules: r"goes over all modules, parameters or buffers of a Told",
    counted_tensors: r"goes over all modules, parameters or buffers of a Told",
    without_gradients: r"'blocks\.0' is called under torch\.no_grad\(\).*requires_grad_\(False\)",
    in_another_precision_in_training: r"'blocks\.0' is called under .*autocast.*around the pipe",
    noise: r"random numbers.*drawn again.*pass them",
    buffer_at_both_ends: r"'mean'.*changes.*parts",
    norm_at_both_ends: r"'norm\.\w+'.*changes.*parts",
    counter: r"'calls'.*buffer",
    replaced: r"'count'.*in place",
    kept_by_a_block: r"sets 'blocks\.0\.kept' anew.*return it",
    told_to_a_block: r"sets 'shift' of block 'blocks\.1'; call the block with it",
}


@pytest.mark.parametrize("told", list(REFUSED), ids=lambda told: told.__name__)
def test_what_would_differ_silently_is_refused_by_name(told: Callable[..., Tensor]):
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[told]):
        piped(made(told)).step(batch(), loss_fn=lambda output: output.square().mean())


WAYS_TO_DRAW: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand([]),
    "one of several": lambda: torch.rand(2)[1],
    "like": lambda: torch.rand_like(torch.zeros(())),
    "uniform_": lambda: torch.empty(1).uniform_(),
    "other bounds": lambda: torch.empty(1).uniform_(-1.0, 0.5),
    "changed": lambda: torch.rand([]).sub_(1),
    "computed": lambda: torch.rand([]) - 1,
}
BOUNDS = {"other bounds": (-1.0, 0.5), "changed": None, "computed": None}
COMPARISONS: dict[str, Callable[[Tensor, float], Any]] = {
    **{each.__name__: each for each in (operator.lt, operator.le, operator.gt, operator.ge)},
    "on the right": lambda drawn, bound: bound > drawn,
    "as a number": lambda drawn, bound: drawn.item() < bound,
}


@given(
    st.sampled_from(sorted(WAYS_TO_DRAW)),
    st.sampled_from(sorted(COMPARISONS)),
    st.sampled_from([-0.5, 0, 0.0, 0.1, 0.9, 1.0, 1.5]),
    st.booleans(),
)
@example("rand", "lt", 0.0, True)
@example("rand", "lt", 0.1, True)
@example("changed", "lt", -1.0, True)
def test_a_comparison_that_does_not_depend_on_what_is_drawn_is_allowed_between_blocks_and_no_other(
    way: str, comparison: str, bound: float, in_training_only: bool
) -> None:
    draw, compare, bounds = WAYS_TO_DRAW[way], COMPARISONS[comparison], BOUNDS.get(way, (0.0, 1.0))

    def told(model: Told, x: Tensor, scale: float) -> Tensor:
        hidden = model.embed(x)
        for block in model.blocks:
            hidden = block(hidden)
            if (model.training or not in_training_only) and compare(draw(), bound):
                hidden = hidden * 2
        return model.head(hidden)

    model = made(told)
    expected = copy.deepcopy(model)
    answers = {bool(compare(torch.tensor(end), bound)) for end in bounds or ()}
    if len(answers) != 1 or comparison == "as a number":
        with pytest.raises(ValueError, match=r"random numbers.*layerdrop"):
            piped(model)
        return
    with closing(piped(model, "always")) as pipe:
        pipe.step(batch(), loss_fn=lambda output: output.square().mean())
    by_micro_batch(expected)
    torch.testing.assert_close(gradients(model), gradients(expected))


def test_a_layerdrop_that_is_set_later_is_refused_where_it_drops_a_block() -> None:
    def told(model: Told, x: Tensor, scale: float) -> Tensor:
        hidden = model.embed(x)
        for block in model.blocks:
            if not (model.training and torch.rand([]) < model.layerdrop):
                hidden = block(hidden)
        return model.head(hidden)

    model = made(told)
    model.layerdrop = 0.0
    with closing(piped(model)) as pipe:
        model.layerdrop = 1.1
        with pytest.raises(RuntimeError, match="layerdrop"):
            pipe.step(batch(), loss_fn=lambda output: output.square().mean())


def changes(model: Told, x: Tensor, scale: float) -> Tensor:
    """In evaluation too."""
    model.norm.num_batches_tracked = model.norm.num_batches_tracked + 1
    model.history = [*getattr(model, "history", []), 1]
    return plain(model, x, scale)


def normed(model: Told, x: Tensor, scale: float) -> Tensor:
    """Batch norm changes its statistics without another version of these."""
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
def test_making_a_pipe_leaves_no_trace_in_the_model(told: Callable[..., Tensor]):
    model = made(told)
    with unchanged(model):
        flatten(model, batch(3))
