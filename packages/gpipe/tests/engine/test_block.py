"""Stages of which some layers are recomputed on their own train as any other, and hold what those hold."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe, _gpipe, record
from gpipe.engine._stage import stages_of
from gpipe.schedule import SCHEDULES
from gpipe.skip import inspect_skip_layout

from ..layers import DOUBLE, Call, Layer, assert_same, linears, piped, rows, running
from ..models import Recipe, assert_close, recipes
from ..module.test_step import SLOW, Way, lived, ways
from ..schedules import V_SHAPED

each_way = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


Flags = Sequence[Sequence[bool]]
"""For each stage, which of its layers are recomputed."""


def flags(balance: list[int], choices: list[bool]) -> Flags:
    every = iter(choices * sum(balance))
    return [[next(every) for _ in range(size)] for size in balance]


def blocks_of(flags: Sequence[bool]) -> Iterator[range]:
    end = 0
    for flag, run in groupby(flags):
        first, end = end, end + len(list(run))
        if flag:
            yield range(first, end)


@contextmanager
def in_blocks(flags: Flags) -> Iterator[list[str]]:
    """Inside, pipes are made with these blocks. Its value are the modes of their stages."""
    blocks = {j: [*blocks_of(own)] for j, own in enumerate(flags) if not all(own)}

    def laid_out(partitions: Any, devices: Any) -> Any:
        layout = inspect_skip_layout([*partitions])
        return stages_of([*partitions], devices, layout, blocks), layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gpipe, "laid_out", laid_out)
        yield ["always" if all(own) else "never" for own in flags]


def made(make: Callable[[list[str]], GPipe], flags: Flags) -> GPipe:
    """What ``make`` makes with these blocks, and with the modes that it is called with."""
    with in_blocks(flags) as modes:
        return make(modes)


@settings(SLOW, max_examples=SLOW.max_examples // 2)
@given(recipes(), ways, st.lists(st.booleans(), min_size=1, max_size=9))
def test_any_flags_are_exact(recipe: Recipe, way: Way, choices: list[bool]):
    """Masks, buffers and gradients are those without checkpointing; to the last bit where no stage is a block."""
    recipe = replace(recipe, training=True, input_needs_grad=True)
    balance = recipe.balance(len(recipe.model()))
    own = flags(balance, choices)
    with in_blocks(own) as modes:
        found = lived(recipe, way, modes)
    plain = lived(recipe, way, "never")
    assert_close(found, plain, recipe)
    if not any(map(all, own)):
        torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("activation", "saved"), [(nn.GELU, 2), (nn.Tanh, 1)], ids=["input", "output"])
def test_what_is_held_falls_by_what_blocks_save(activation: type[nn.Module], saved: int):
    """Also if an operation saves its output; until the last backward, with what recomputations save."""

    def held(own: Flags) -> int:
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), activation(), nn.Linear(256, 64)) for _ in range(4)])
        with closing(made(lambda modes: piped(layers, [3, 1], chunks=4, checkpoint=modes), own)) as pipe:
            x, y = torch.zeros(64, 64), torch.zeros(64, 64)
            with gpipe.inline():
                pipe.step(x, y, loss_fn=F.mse_loss, schedule="fill_drain")
                with record(memory=True) as timeline:
                    pipe.step(x, y, loss_fn=F.mse_loss, schedule="fill_drain")
        return timeline.peak_bytes[0]

    counts = [held([[True] * k + [False] * (3 - k), [False]]) for k in range(3)]
    layer = saved * 16 * 256 * 4  # activations of 16 rows and 256 columns
    inner = 16 * 64 * 4  # what is between two layers of a block
    assert [a - b for a, b in pairwise(counts)] == pytest.approx([4 * layer, 4 * (layer + inner)], rel=0.02)


def uses(module: nn.Module) -> nn.Module:
    return Layer(lambda s, x: s.m[0](x), module)


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(["own", "linear", "norm"]), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from(sorted(SCHEDULES.keys() - V_SHAPED)),
    st.booleans(),
)
def test_what_blocks_share_is_as_in_a_whole_partition(
    kinds: list[str], choice: list[bool], schedule: str, inline: bool
):
    """Also what their forwards change; of two partitions, weights alone."""
    linear, norm = linears(1), nn.BatchNorm1d(3, dtype=DOUBLE)
    make = {"own": lambda: linears(1), "linear": lambda: uses(linear), "norm": lambda: uses(norm)}
    plain = nn.Sequential(linears(1), *(make[kind]() for kind in kinds), uses(linear), linears(1))
    own: Flags = [[True, *choice], [False, False]]
    with closing(made(lambda modes: piped(plain, [6, 2], chunks=2, checkpoint=modes), own)) as pipe, running(inline):
        for _ in range(2):
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule)
            for x in rows(8).chunk(2):
                (F.mse_loss(plain(x), x) / 2).backward()
            assert_same(pipe, plain)
            torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()))


@each_way
@pytest.mark.parametrize("choice", [*product([False, True], repeat=3)])
def test_layers_see_their_phase_and_draw_the_same_again_from_their_own_generator(
    choice: tuple[bool, ...], inline: bool
):
    seen: list[list[tuple[bool, bool, float]]] = [[] for _ in choice]

    def noisy(k: int, own: torch.Generator) -> nn.Module:
        def act(x: Tensor) -> Tensor:
            noise = torch.rand((), generator=own)
            seen[k].append((gpipe.is_checkpointing(), gpipe.is_recomputing(), noise.item()))
            return (x * noise).tanh()

        return Call(act)

    model = nn.Sequential(*[noisy(k, torch.Generator().manual_seed(k)) for k in range(3)])
    pipe = made(lambda modes: piped(model, [3], chunks=1, checkpoint=modes), [choice])
    with closing(pipe), running(inline):
        pipe(rows(grad=True)).sum().backward()
    for flag, calls in zip(choice, seen, strict=True):
        assert [call[:2] for call in calls] == ([(True, False), (False, True)] if flag else [(False, False)])
        assert len({noise for *_, noise in calls}) == 1


def test_errors_and_timelines_speak_of_partitions():
    layers, own = linears(6), [[True, False] * 2, [True, False]]
    with closing(made(lambda modes: piped(layers, [4, 2], checkpoint=modes), own)) as pipe:
        with record(memory=True) as timeline:
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)
        assert {event.stage: event.layers for event in timeline.events} == {0: "'0' to '3'", 1: "'4' to '5'"}
        pipe[5].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)
        assert "in partition 1 (layers '4' to '5')" in caught.value.__notes__[0]


@pytest.mark.parametrize("call", [1, 2])
@each_way
def test_a_forward_or_recomputation_that_fails_leaves_no_phase_behind(call: int, inline: bool):
    seen, calls = list[tuple[bool, bool]](), iter(range(1, 9))

    def act(x: Tensor) -> Tensor:
        assert next(calls) != call
        seen.append((gpipe.is_checkpointing(), gpipe.is_recomputing()))
        return x.sin()

    model = nn.Sequential(Call(act), *linears(1))
    with closing(made(lambda modes: piped(model, [2], chunks=1, checkpoint=modes), [[True, False]])) as pipe:
        with running(inline), pytest.raises(AssertionError):
            pipe(rows(grad=True)).sum().backward()
        with running(inline), torch.no_grad():
            pipe(rows())
    assert seen[-1] == (False, False)


def counts(s: Layer, x: Tensor) -> Tensor:
    """Depends on how often it was called, which nobody can put back."""
    s.calls.append(None)
    return (x * len(s.calls)).sin()


def saves_more(s: Layer, x: Tensor) -> Tensor:
    """Gives the same each time, by other operations."""
    s.calls.append(None)
    return x.sin() if len(s.calls) < 2 else x.sin() + (x * x) * 0


@each_way
@pytest.mark.parametrize(
    ("layers", "choice", "says"),
    [
        ([Layer(counts, calls=[])], [True, False], "gave another output"),
        ([Layer(saves_more, calls=[])], [True, False], "did other operations"),
        ([nn.Sigmoid(), Call(lambda x: x.mul_(2))], [True, True, False], "modified by an inplace operation"),
    ],
    ids=["other output", "other operations", "in place"],
)
def test_what_cannot_be_repeated_is_refused(layers: list[nn.Module], choice: list[bool], says: str, inline: bool):
    model = nn.Sequential(*copy.deepcopy(layers), nn.Linear(3, 3, dtype=DOUBLE))
    pipe = made(lambda modes: piped(model, [len(model)], checkpoint=modes), [choice])
    with closing(pipe), running(inline), pytest.raises(RuntimeError, match=says):
        pipe.step(rows(4, grad=True), rows(4), loss_fn=F.mse_loss)


def test_a_pipe_inside_of_a_checkpointed_layer_is_refused():
    inner = piped(linears(2), [1, 1], checkpoint="never")
    model = nn.Sequential(inner, *linears(2))
    pipe = made(lambda modes: piped(model, [2, 1], checkpoint=modes), [[True, False], [False]])
    with closing(inner), closing(pipe), pytest.raises(RuntimeError, match="computes on other threads"):
        pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)


def test_derivatives_inside_of_a_checkpointed_layer_are_refused():
    """torch.func cannot save tensors by hooks."""
    slope = Call(torch.func.vmap(torch.func.grad(lambda row: row.sin().sum())))
    model = nn.Sequential(slope, *linears(2))
    pipe = made(lambda modes: piped(model, [2, 1], checkpoint=modes), [[True, False], [False]])
    with closing(pipe), pytest.raises(RuntimeError, match="saved tensor hooks"):
        pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)
    with closing(piped(model, [2, 1], checkpoint="always")) as pipe:
        pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)


def test_a_compiled_partition_is_refused():
    with closing(made(lambda modes: piped(linears(3), [2, 1], checkpoint=modes), [[True, False], [False]])) as pipe:
        pipe.partitions[0].compile(backend="eager")
        with pytest.raises(RuntimeError, match="partition 0 is compiled as a whole"):
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)


def test_a_block_in_place_on_memory_that_two_of_its_inputs_share():
    """Copies of both, kept for the recomputation, would not see each other's changes."""
    last = nn.Linear(3, 3, dtype=DOUBLE)
    twice = Layer(lambda s, x: (y := s.m[0](x), y.view_as(y)), linears(1))
    changes = Layer(lambda s, pair: s.m[0](pair[0].mul_(2) * pair[1].tanh()), last)
    model = nn.Sequential(twice, changes)
    with closing(made(lambda modes: piped(model, [2], chunks=2, checkpoint=modes), [[False, True]])) as pipe:
        pipe(rows()).sum().backward()
        model(rows()).sum().backward()
        assert_same(pipe, model)
