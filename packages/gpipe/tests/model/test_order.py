"""A forward on meta tensors determines the order in which a model uses its modules."""

import copy
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.model._blocks import divide
from gpipe.model._order import find_order
from gpipe.module._inputs import Inputs

from ..layers import rows
from .forwards import Told, models


class Backwards(nn.Module):
    """Registers its modules in a different order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))
        self.second = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed = nn.Embedding(5, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(x)
        for layer in (*self.first, *self.second):
            x = torch.nn.functional.dropout(layer(x), 0.1)
        return self.head(x * self.scale)


def test_blocks_and_rest_are_ordered_by_use() -> None:
    pipe = GPipe(Backwards(), devices=["cpu"] * 2, sample=torch.arange(4))
    assert pipe.block_names == ["first.0", "first.1", "second.0", "second.1"]
    first, last = ([name for name, _ in part.named_parameters()] for part in pipe.partitions)
    assert "embed.weight" in first
    assert {"head.weight", "scale"} <= {*last}


def test_blocks_that_are_named_keep_their_order() -> None:
    pipe = GPipe(Backwards(), devices=["cpu"] * 2, sample=torch.arange(4), blocks=["second", "first"])
    assert pipe.block_names == ["second.0", "second.1", "first.0", "first.1"]


@given(models(without=("branch",)))
def test_order_of_calls_is_found_without_changes(told: Told) -> None:
    model = told.model()
    blocks = divide(model, 1).blocks
    seen: list[str] = []
    x = rows(3)[:, :2]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = find_order(model, blocks, Inputs.of(x))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name)) for name, module in blocks.items()
    ]
    try:
        model(x)
    except RuntimeError as error:  # the plain model cannot compute this with gradients
        assume("inplace" not in str(error) and "in-place" not in str(error))
        raise
    for hook in hooks:
        hook.remove()
    assert found.blocks == [*dict.fromkeys(seen)]


class Lazy(Backwards):
    """Keeps values of its parameters in attributes and in a block, and a mean of its embedding in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + self.embed(x).detach().mean(0)
        if self.kept is None:
            self.kept = self.table = self.first[0].table = self.scale.detach().exp()
        return super().forward(x) * self.kept


def test_state_set_during_meta_forward_is_reset() -> None:
    model, x = Lazy(), torch.arange(4)
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    find_order(model, divide(model, 1).blocks, Inputs.of(x))
    for name, module in model.named_modules():
        after = {key: value for key, value in vars(module).items() if key in before[name] or value is not None}
        assert after.keys() == before[name].keys()
        assert all(value is before[name][key] for key, value in after.items())
    torch.testing.assert_close(dict(model.named_buffers()), buffers)
    pipe = GPipe(model, devices=["cpu"] * 2, sample=x)
    assert pipe(x).isfinite().all()


def test_value_dependent_forward_keeps_registration_order(caplog: Any) -> None:
    class Reading(Backwards):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(x) if x.sum() > 1e9 else super().forward(x.argmax(-1))

    with caplog.at_level("INFO", "gpipe"):
        pipe = GPipe(Reading(), devices=["cpu"] * 2, sample=torch.arange(4))
    assert pipe.block_names == ["second.0", "second.1", "first.0", "first.1"]
    assert "is not known" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_data_has_an_order_too(device: str) -> None:
    with torch.device(device):
        model = Backwards()
    found = find_order(model, divide(model, 1).blocks, Inputs.of(torch.arange(4)))
    assert found.blocks == ["first.0", "first.1", "second.0", "second.1"]


STATES: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "defaultdict": lambda: defaultdict(bool),
    "nested": lambda: {"state": {}},
    "list": list,
    "set": set,
    "object": SimpleNamespace,
}


def _is_first(state: Any) -> bool:
    """Return whether this is the first call with ``state``, which remembers it."""
    if isinstance(state, set | list):
        found = 0 in state
        state.add(0) if isinstance(state, set) else state.append(0)
    else:
        values = vars(state) if isinstance(state, SimpleNamespace) else state.get("state", state)
        found = values.get("is_ready", False)
        values["is_ready"] = True
    return not found


class Prepared(nn.Module):
    """Registers hooks, layers and buffers in its first forward, and remembers that it did."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.table: dict[int, Tensor] = {}
        self.state, self.tables = state, {"nested": dict[int, Tensor]()}
        self.once = self.register_forward_pre_hook(self._begin)
        self.register_forward_pre_hook(lambda module, args: (args[0] * module.factor,))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.factor = 2.0
        self.once.remove()

    def forward(self, x: Tensor) -> Tensor:
        if _is_first(self.state):
            for block in self.blocks:
                block.register_forward_hook(lambda module, args, output: output * 2)
                block.weight.register_hook(lambda gradient: gradient * 3)
            self.register_buffer("scale", torch.full((4,), 3.0, dtype=x.dtype))
            self.activation = nn.Tanh()
        for block in self.blocks:
            x = block(x)
            # A table that depends on values of blocks must not stay on meta.
            self.table.setdefault(1, torch.ones_like(x[:1]))
            self.tables["nested"].setdefault(1, torch.ones_like(x[:1]))
        return self.activation(x * self.scale * self.table[1] * self.tables["nested"][1])


@given(st.sampled_from([*STATES]), st.integers(1, 4), st.booleans())
def test_first_forward_is_left_to_the_pipe(kind: str, chunks: int, ran: bool) -> None:
    """The dry run on ``meta`` leaves no hooks, layers or values in the model, wherever that remembers its first run."""
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, plain = (Prepared(STATES[kind]()).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain) if ran else ():
        each(x)
    expected = plain(x)
    expected.sum().backward()
    before = _content(model)
    found = find_order(model, divide(model, 1).blocks, Inputs.of(x))
    assert found.blocks == [f"blocks.{k}" for k in range(4)]
    assert _content(model) == before
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=chunks, sample=x[:2])
    output = pipe(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def _content(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of all modules, with copies of their dicts and lists."""
    return [
        {
            name: copy.copy(value) if isinstance(value, dict | list | set) else value
            for name, value in vars(each).items()
        }
        for each in model.modules()
    ]


class Seeded(Backwards):
    """Seeds torch's generator in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().forward(x)


def test_seeds_of_the_forward_do_not_stay() -> None:
    model = Seeded()
    torch.manual_seed(7)
    torch.rand(2)
    state = torch.get_rng_state()
    find_order(model, divide(model, 1).blocks, Inputs.of(torch.arange(4)))
    assert torch.initial_seed() == 7
    assert torch.equal(torch.get_rng_state(), state)
