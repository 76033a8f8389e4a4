"""Checkpointing affects only the time of computation, and raises if it would affect results."""

import contextlib
import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline, is_checkpointing, is_recomputing

from ..layers import DOUBLE, MODES, Layer, assert_same, assert_trains_like, linears, numbered, piped, rows

each_mode = pytest.mark.parametrize("checkpoint", MODES)
KEEPING = ("never", "offload")
"""Modes without recomputation."""


class Diary(nn.Module):
    """Writes down which micro-batch it sees, and in which phase."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.entries.append((int(x.detach().flatten()[0]), is_checkpointing(), is_recomputing()))
        return x

    def microbatches(self, *, checkpointing: bool, recomputing: bool) -> list[int]:
        return [i for i, c, r in self.entries if (c, r) == (checkpointing, recomputing)]


def written(checkpoint: str, *, chunks: int = 3, count: int = 3, train: bool = True) -> Diary:
    diary = Diary()
    pipe = GPipe(nn.Sequential(diary, nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint)
    pipe.train(train)
    pipe(numbered(count).requires_grad_()).sum().backward()
    pipe.close()
    return diary


@each_mode
@given(st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_layers_see_which_micro_batches_are_checkpointed(checkpoint: str, count: int, more: int, train: bool) -> None:
    """Except the last means the last that exists; evaluation checkpoints nothing."""
    diary = written(checkpoint, chunks=count + more, count=count, train=train)
    stop = {"always": count, "except_last": count - 1}.get(checkpoint, 0) if train else 0
    assert diary.microbatches(checkpointing=True, recomputing=False) == [*range(stop)]
    assert diary.microbatches(checkpointing=False, recomputing=True) == [*reversed(range(stop))]
    assert diary.microbatches(checkpointing=False, recomputing=False) == [*range(stop, count)]


@pytest.mark.parametrize("way", [contextlib.nullcontext, inline])
@pytest.mark.parametrize("inner", MODES)
@each_mode
def test_nested_pipe_preserves_outer_micro_batches(
    checkpoint: str, inner: str, way: Callable[[], AbstractContextManager[None]]
) -> None:
    """The inner pipe's runs may start and end on the same thread in between."""
    diaries = [Diary() for _ in range(2)]
    inside = GPipe(nn.Sequential(Diary(), Diary()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=inner)
    around = nn.Sequential(diaries[0], inside, diaries[1])
    pipe = GPipe(nn.Sequential(around, Diary()), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    with way():
        pipe(numbered(3).requires_grad_()).sum().backward()
    expected = written(checkpoint).entries
    assert [sorted(diary.entries) for diary in diaries] == [sorted(expected)] * 2
    assert sorted(pipe[1].entries) == sorted(expected)


@pytest.mark.parametrize("way", [contextlib.nullcontext, inline])
@pytest.mark.parametrize("call", [1, 2])
def test_failed_run_resets_phase(call: int, way: Callable[[], AbstractContextManager[None]]) -> None:
    diary, calls = Diary(), iter(range(1, 9))

    def fail(*_: Any) -> None:
        assert next(calls) != call

    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), diary), nn.Identity(), nn.Identity())
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, checkpoint="always")
    with way():
        hook = model[0][0].register_forward_hook(fail)
        with pytest.raises(AssertionError):
            pipe(torch.ones(1, 1)).sum().backward()
        hook.remove()
        diary.entries.clear()
        pipe.checkpoint = "never"
        with torch.no_grad():
            pipe(torch.ones(1, 1))
    assert [phase for _, *phase in diary.entries] == [[False, False]]
    pipe.close()


def with_buffer() -> nn.Sequential:
    """Linear layers; the middle one also scales by a buffer."""
    first, middle, last = linears()
    middle.register_buffer("scale", torch.ones(3, dtype=DOUBLE))
    middle.register_forward_hook(lambda module, inputs, output: output * module.scale)
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last)


Change = Callable[[GPipe], Any]


def _optimizer_step(pipe: GPipe) -> None:
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    pipe.zero_grad()


def _load_state(pipe: GPipe, **options: Any) -> None:
    pipe.load_state_dict({key: 2 * value for key, value in pipe.state_dict().items()}, **options)


def _swap_data(pipe: GPipe) -> None:
    for parameter in pipe.parameters():
        parameter.data = 2 * parameter.data


def _slopes(kind: str) -> Callable[..., Any]:
    """A hook that doubles gradients, and leaves values as they are."""

    def on_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 2 - output.detach()

    def on_input(module: nn.Module, inputs: Any) -> Any:
        return (inputs[0] * 2 - inputs[0].detach(),)

    def on_gradients(module: nn.Module, *gradients: Any) -> Any:
        return (gradients[0][0] * 2,)

    return {"forward": on_output, "forward_pre": on_input}.get(kind, on_gradients)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_optimizer_step, "'0.weight', '0.bias'"),
        (_load_state, "'0.weight', '0.bias'"),
        (lambda pipe: pipe.eval(), r"train\(\) or eval\(\)"),
        (lambda pipe: pipe[2].eval(), r"train\(\) or eval\(\)"),
        (lambda pipe: setattr(pipe[2], "weight", nn.Parameter(2 * pipe[2].weight.detach())), "'2.weight'"),
        (partial(_load_state, assign=True), "'0.weight'"),
        (_swap_data, "'0.weight'"),
        (lambda pipe: pipe[2].weight.requires_grad_(False), "'2.weight' changed between the forward and the"),
        (lambda pipe: pipe[0].bias.requires_grad_(True), "'0.bias' changed between the forward and the backward"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_changes_before_the_recomputation_are_refused_by_name(change: Change, named: str, checkpoint: str) -> None:
    """The plain model would use the values of the forward, or raise."""
    pipe = piped(with_buffer(), [1, 4], chunks=2, checkpoint=checkpoint)
    pipe[0].bias.requires_grad_(False)
    if checkpoint == "except_last":  # torch raises for an in-place change of a tensor saved by the last graph
        named = f"{named}|modified by an inplace operation"
    for changes in (False, True):
        output = pipe(rows())
        if changes:
            change(pipe)
            pipe.zero_grad()
        with pytest.raises(RuntimeError, match=named) if changes else contextlib.nullcontext():
            output.square().sum().backward()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("adds", [True, False])
@each_mode
def test_hooks_that_come_or_go(kind: str, adds: bool, checkpoint: str) -> None:
    """Otherwise recomputed gradients would differ from the plain model's."""
    model = nn.Sequential(*linears(1), nn.Sequential(*linears(2)))
    pipe = piped(model, [1, 1], chunks=2, checkpoint=checkpoint)
    handles = [getattr(each[1][0], f"register_{kind}_hook")(_slopes(kind)) for each in (model, pipe)]
    expected, output = model(rows()), pipe(rows())
    for each, handle in zip((model, pipe), handles, strict=True):
        getattr(each[1][1], f"register_{kind}_hook")(_slopes(kind)) if adds else handle.remove()
    expected.square().sum().backward()
    if checkpoint in KEEPING:
        output.square().sum().backward()
        assert_same(pipe, model)
    else:
        names = "'1.1'" if adds else "'1.0'"
        with pytest.raises(RuntimeError, match=f"hooks of {names} were added or removed between the forward"):
            output.square().sum().backward()
    pipe.zero_grad()
    model.zero_grad()
    assert_trains_like(pipe, model)
    pipe.close()


@each_mode
def test_replaced_submodule_raises(checkpoint: str) -> None:
    """The replacement is equal, so that recomputed outputs do not reveal it."""
    model = nn.Sequential(*linears(1), nn.Sequential(*linears(2)))
    pipe = piped(model, [1, 1], chunks=2, checkpoint=checkpoint)
    output, own = pipe(rows()), pipe[1][1]
    model(rows()).square().sum().backward()
    pipe[1][1] = copy.deepcopy(own)
    if checkpoint in KEEPING:
        output.square().sum().backward()
        pipe[1][1] = own
        assert_same(pipe, model)
    else:
        with pytest.raises(RuntimeError, match=r"layer '1\.1' was replaced .* between the forward"):
            output.square().sum().backward()
    pipe.close()


@each_mode
def test_temporary_hooks_on_shared_module(checkpoint: str) -> None:
    """A flattened model with tied parameters does so. The other stage must neither use nor remove the hooks."""

    def doubled(s: Layer, x: Tensor) -> Tensor:
        own, shared = s.m
        handle = shared.register_forward_hook(lambda module, inputs, output: output * 2)
        threading.Event().wait(0.01)  # let the other worker continue
        try:
            return shared(own(x))
        finally:
            handle.remove()

    shared = linears(1)
    plain = Layer(lambda s, x: s.m[0](x), linears(1), shared)
    model = nn.Sequential(plain, Layer(doubled, linears(1), shared))
    pipe = piped(model, [1, 1], chunks=4, checkpoint=checkpoint)
    for _ in range(3):
        assert_trains_like(pipe, model)
    pipe.close()


@pytest.mark.parametrize(
    "change", [lambda pipe: pipe[2].scale.mul_(2), lambda pipe: setattr(pipe[2], "scale", 2 * pipe[2].scale)]
)
def test_buffers_are_put_back(change: Change) -> None:
    model = with_buffer()
    pipe = piped(model, [1, 4], chunks=2, checkpoint="always")
    model(rows()).square().sum().backward()
    output = pipe(rows())
    change(pipe)
    output.square().sum().backward()
    assert_same(pipe, model)
    assert torch.equal(pipe[2].scale, torch.full((3,), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_changed_input_raises_after_first_run(checkpoint: str) -> None:
    pipe = piped(linears(), [1, 2], chunks=2, checkpoint=checkpoint)
    pipe(rows()).sum().backward()
    x = rows()
    output = pipe(x)
    x.add_(1)
    named = "the input of checkpointed layers was changed in place" if checkpoint == "always" else "inplace operation"
    with pytest.raises(RuntimeError, match=named):
        output.sum().backward()


def test_state_added_by_first_forward_is_allowed() -> None:
    """The first micro-batch keeps its graph. The others find the addition, and are recomputed."""
    seen: list[Tensor] = []

    def cached(layer: Layer, x: Tensor) -> Tensor:
        layer.cache = getattr(layer, "cache", 2)
        seen.append(x)
        return x * layer.cache

    pipe = piped(nn.Sequential(Layer(cached), *linears(1)), [1, 1], chunks=3, checkpoint="always")
    pipe(rows()).sum().backward()
    assert len(seen) == 3 + 2
    pipe.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is .*:DeprecationWarning")
@each_mode
def test_scripted_layers_work_without_recomputation(checkpoint: str) -> None:
    model = nn.Sequential(torch.jit.script(linears(1)[0]), *linears(1))
    pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    refused = pytest.raises(RuntimeError, match=r"'0' is a scripted module .* checkpoint='never'")
    with contextlib.nullcontext() if checkpoint in KEEPING else refused:
        pipe(rows()).sum().backward()
