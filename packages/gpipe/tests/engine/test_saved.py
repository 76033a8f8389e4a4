"""A pipe with ``checkpoint="offload"`` has the same results as one with ``"never"``.

More is in tests of all modes, and in tests/simulated/test_saved.py.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import current_thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import gpipe
from gpipe import GPipe
from gpipe.engine import _saved
from gpipe.schedule import Schedule

from ..layers import (
    ALL_ROWS,
    Call,
    Layer,
    Pop,
    Stash,
    Tied,
    assert_same,
    linear,
    linears,
    on_backward,
    rows,
    running,
    trained,
    within,
)
from ..model.residuals import Residuals
from ..odd_layers import OUTSIDE, WIDTH, make
from ..test_combinations import Combination, combinations, seen
from ..test_combinations import piped as stepped

HOWS = (None, "fill_drain", "1f1b", "looped_bfs", "zero_bubble", ALL_ROWS)
each_how = pytest.mark.parametrize("how", HOWS)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of every storage that is offloaded."""
    found, leave = list[int](), _saved._Storage.__init__

    def watched(self: Any, host: Tensor) -> None:
        found.append(host.nbytes)
        leave(self, host)

    monkeypatch.setattr(_saved._Storage, "__init__", watched)
    return found


def offloading(layers: nn.Module, stages: int | None = None, mode: Any = "offload", **options: Any) -> GPipe:
    if stages is None:
        stages, options = len(layers), {"balance": [1] * len(layers), **options}
    return GPipe(layers, devices=["cpu"] * stages, checkpoint=mode, **{"chunks": 4, **options})


@given(combinations)
def test_any_layers_train_as_without(case: Combination) -> None:
    """Results are equal bit for bit, with state and random numbers; or both raise."""
    never, offload = (outcomes(replace(case, modes=(mode,))) for mode in ("never", "offload"))
    for a, b in zip(never, offload, strict=False):
        if isinstance(b, RuntimeError) and "saved tensor hooks" in str(b):
            assert "func_inside" in case.layers
            return
        assert type(a) is type(b), (a, b)
        if isinstance(a, Exception):
            return
        assert a[0] == b[0]
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=0, equal_nan=True)


def outcomes(case: Combination) -> list[Any]:
    """Return the observable result of each step, or the error that ends them."""
    found: list[Any] = []
    try:
        with closing(case.pipe(case.model())) as pipe:
            for k, step in enumerate(case.steps):
                OUTSIDE["calls"] = 0
                found.append(copy.deepcopy(seen(stepped, pipe, case, step, k)))
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
        found.append(error)
    return found


@given(
    st.integers(1, 4),
    st.sampled_from(HOWS),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["offload", "always", "never", "except_last"]), min_size=1, max_size=3),
    st.sets(st.integers(0, 3)),
)
def test_modes_of_stages_and_parameters_on_the_host(
    count: int,
    how: str | None,
    chunks: int,
    workers: int,
    inline: bool,
    loads: bool,
    modes: list[str],
    frozen: set[int],
) -> None:
    """Equal to the plain model for any modes, with frozen stages, on few workers."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(count)))
    for k in frozen & {*range(count - 1)}:
        plain[k].requires_grad_(False)
    layers, x = copy.deepcopy(plain), rows().requires_grad_()
    places = [f"cpu:{j % workers}" for j in range(count)]
    modes = [modes[j % len(modes)] for j in range(count)]
    options = {"devices": places, "chunks": chunks, "checkpoint": modes, "offload": loads}
    with closing(GPipe(layers, [1] * count, **options)) as pipe, running(inline):
        for _ in range(2):
            torch.testing.assert_close(within(60, partial(trained, pipe, x, how)), trained(plain, x))
    assert_same(layers, plain)


@each_how
def test_what_is_saved_travels_and_the_rest_stays(how: str | None, moved: list[int]) -> None:
    """The weight, its view, a buffer, the input and the output stay. A storage with several views is copied once."""
    threads: list[str] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        threads.append(current_thread().name)
        wide = torch.cat([x, x, x], 1)  # one storage; three views of it are saved
        a, b, c = wide.chunk(3, 1)
        return ((a * b * c) @ s.m[0].weight) * s.scale + s.m[0](x)

    layers = nn.Sequential(*(Layer(forward, linear(), scale=rows(1)[0]) for _ in range(2)))
    plain, x = copy.deepcopy(layers), rows(8).requires_grad_()
    with closing(offloading(layers)) as pipe, gpipe.record() as timeline:
        trained(pipe, x, how)
    assert len(threads) == 2 * 4
    assert current_thread().name not in threads
    trained(plain, x)
    assert_same(layers, plain)
    cell = 2 * 3 * 8  # two rows of three numbers
    assert {*moved} == {cell, 3 * cell}  # two products, and the memory of a, b and c
    offloads = [event for event in timeline.events if event.kind == "offload"]
    assert len(moved) == 3 * len(offloads) >= 3


def test_small_tensors_stay(moved: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2)))
    monkeypatch.setattr(_saved, "SMALL", 2 * 3 * 8 + 1)
    trained(offloading(layers), rows(8), "fill_drain")
    assert moved == []


def test_last_stage_of_1f1b_does_not_offload(moved: list[int]) -> None:
    layers = nn.Sequential(*linears(1), nn.Sequential(linear(), nn.Tanh(), linear()))
    with closing(offloading(layers, mode=["never", "offload"])) as pipe, gpipe.record() as timeline:
        trained(pipe, rows(8), "1f1b")
    assert moved == []
    assert {str(event.kind) for event in timeline.events} == {"forward", "backward"}


def test_a_recording_counts_what_is_on_the_device() -> None:
    """Copies on the host are not counted."""
    layers, peaks = nn.Sequential(*(nn.Sequential(*[Call(torch.exp)] * 8) for _ in range(2))), {}
    for mode in ("never", "always", "offload"):
        pipe = offloading(layers, mode=mode, chunks=10)
        with closing(pipe), running(True), gpipe.record(memory=True) as timeline:
            trained(pipe, torch.zeros(20, 100, requires_grad=True), "fill_drain")
        peaks[mode] = sum((timeline.peak_bytes or {}).values())
    assert peaks["always"] < peaks["offload"] < peaks["never"] / 2


@each_how
@pytest.mark.parametrize("inline", [False, True])
def test_what_a_model_saves_travels(how: str | None, inline: bool, moved: list[int]) -> None:
    """There are operations between blocks, and a weight used by two stages."""
    model = Residuals(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(5)))
    model.head.weight = model.embed.weight
    plain, x = copy.deepcopy(model), rows(8).requires_grad_()
    with closing(offloading(model, 3)) as pipe, running(inline):
        for _ in range(2):
            torch.testing.assert_close(within(60, partial(trained, pipe, x, how)), trained(plain, x))
            assert_same(model, plain)
    assert moved


@each_how
def test_skips_and_tied_weights(how: str | None) -> None:
    first = linear()
    layers = nn.Sequential(first, Stash(), nn.Tanh(), linear(), nn.Tanh(), Pop(), Tied(first), nn.ReLU(inplace=True))
    plain, x = copy.deepcopy(layers), rows(8).requires_grad_()
    pipe = GPipe(layers, [2, 3, 3], devices=["cpu"] * 3, chunks=4, checkpoint="offload")
    with closing(pipe):
        for _ in range(2):
            torch.testing.assert_close(within(60, partial(trained, pipe, x, how)), trained(plain, x))
    assert_same(layers, plain)


@each_how
def test_a_change_after_saving_is_noticed(how: str | None) -> None:
    """It raises like autograd, in the forward itself and later, after the tensor was offloaded."""

    def at_once(x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z

    kept: list[Tensor] = []

    def later(x: Tensor) -> Tensor:
        y = x.exp()
        kept.append(y.detach())
        if len(kept) > 1:
            kept[0].add_(1)
        return y * 2

    for change in (at_once, later):
        kept.clear()
        layers = nn.Sequential(nn.Sequential(*linears(1), Call(change)), *linears(2))
        with closing(offloading(layers)) as pipe, pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(pipe, rows(8), how)


def test_a_change_of_a_fetched_tensor_is_noticed() -> None:
    """A function modifies its saved tensor, which a different function has also saved."""
    layers = nn.Sequential(*linears(1), nn.Sequential(Call(lambda x: (x * 1).exp()), Call(Spoils.apply)), *linears(1))
    with closing(offloading(layers)) as pipe, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(pipe, rows(8), "fill_drain")


class Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.saved_tensors[0].add_(1)
        return gradient * 2


@each_how
def test_a_failure_leaves_nothing(how: str | None) -> None:
    """Neither gradients nor memory of the host, and the next step is right."""

    def fail() -> None:
        raise ValueError("in a backward")

    hosts: list[weakref.ref[Any]] = []

    class Watched(_saved._Storage):
        def __init__(self, host: Tensor) -> None:
            super().__init__(host)
            hosts.append(weakref.ref(host.untyped_storage()))

    broken = Layer(lambda s, x: on_backward(x.tanh(), fail) if s.fails else x.tanh(), fails=True)
    layers = nn.Sequential(*linears(1), broken, *linears(1))
    pipe, plain, x = offloading(layers), nn.Sequential(*linears(1), nn.Tanh(), *linears(1)), rows(8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_saved, "_Storage", Watched)
        with pytest.raises(ValueError, match="in a backward"):
            trained(pipe, x, how)
        gc.collect()
        assert hosts
        assert not any(host() for host in hosts)
    pipe.zero_grad()
    broken.fails = False
    trained(pipe, x, how)
    trained(plain, x)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
    pipe.close()


def test_host_memory_is_freed_with_the_graph() -> None:
    hosts: list[weakref.ref[Any]] = []

    class Watched(_saved._Storage):
        def __init__(self, host: Tensor) -> None:
            super().__init__(host)
            hosts.append(weakref.ref(host.untyped_storage()))

    layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2)))
    with pytest.MonkeyPatch.context() as patched, closing(offloading(layers)) as pipe:
        patched.setattr(_saved, "_Storage", Watched)
        output = pipe(rows(8))
        assert any(host() for host in hosts)
        del output
        gc.collect()
        assert not any(host() for host in hosts)


def test_a_second_backward_is_refused_as_ever() -> None:
    pipe = offloading(nn.Sequential(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2))))
    loss = pipe(rows(8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()
    pipe.close()


@pytest.mark.parametrize("hooks", [save_on_cpu, partial(saved_tensors_hooks, lambda x: x, lambda x: x)])
def test_hooks_around_a_pipe_are_refused_by_name(hooks: Callable[[], Any]) -> None:
    pipe = offloading(linears(2))
    with hooks(), pytest.raises(RuntimeError, match="checkpoint='offload' is called inside"):
        trained(pipe, rows(8), "1f1b")
    with hooks():
        pipe.evaluate(rows(8), loss_fn=lambda y: y.sum(), reduction="sum")
    trained(pipe, rows(8), "1f1b")
    pipe.close()


def test_hooks_inside_a_layer_keep_what_they_save() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with save_on_cpu():
            return s.m[0](x).tanh()

    layers = nn.Sequential(*(Layer(forward, linear()) for _ in range(3)))
    plain = copy.deepcopy(layers)
    with closing(offloading(layers)) as pipe:
        trained(pipe, rows(8), "zero_bubble")
    trained(plain, rows(8))
    assert_same(layers, plain)


class Across(nn.Module):
    """Enters hooks around blocks of several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            for block in self.blocks:
                x = block(x)
        return x


@each_how
def test_hooks_across_stages_are_refused_by_name(how: str | None) -> None:
    with closing(offloading(Across(), 2)) as pipe:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="each partition has hooks of its own"):
                trained(pipe, rows(8), how)
        pipe.checkpoint = "never"
        trained(pipe, rows(8), how)


class Kind(Tensor):
    pass


@each_how
def test_saved_tensor_of_subclass_raises(how: str | None) -> None:
    """torch's hooks would drop the class, and a function would unpack a different tensor than it saved."""
    layers = linears(3)
    layers[0].weight = nn.Parameter(layers[0].weight.detach().as_subclass(Kind))
    with closing(offloading(layers)) as pipe, pytest.raises(RuntimeError, match="saves a tensor of class Kind"):
        trained(pipe, rows(8), how)


def test_complex_and_sparse_tensors() -> None:
    """Conjugated tensors and sparse ones stay; what they save is right."""

    def forward(s: Any, x: Tensor) -> Tensor:
        wide = torch.fft.fft(x * 1)
        dense = torch.view_as_real(wide * wide.conj() * wide).sum(-1)
        return torch.sparse.mm(dense.relu().to_sparse(), s.m[0].weight) + s.m[0](x)

    layers = nn.Sequential(*(Layer(forward, linear()) for _ in range(2)))
    plain = copy.deepcopy(layers)
    with closing(offloading(layers)) as pipe:
        trained(pipe, rows(8), "fill_drain")
    trained(plain, rows(8))
    assert_same(layers, plain)


def test_a_backward_that_no_action_announces(moved: list[int]) -> None:
    """A graph that a layer keeps for itself is brought back when it is needed."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if s.kept:
            s.kept.pop().backward()
        leaf = x.detach().requires_grad_()
        s.kept.append((s.m[0](leaf).exp() * 2).square().sum())
        return x * s.m[0].bias

    layers = nn.Sequential(*(Layer(forward, linear(), kept=[]) for _ in range(2)))
    plain = copy.deepcopy(layers)
    with closing(offloading(layers, chunks=3)) as pipe, running(True):
        pipe(rows(6))
    assert moved
    for part in rows(6).chunk(3):
        plain(part)
    assert_same(layers, plain)


def test_a_schedule_may_say_itself_which_cells_travel(moved: list[int]) -> None:
    layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2)))
    text = "F0@0 O0@0 F1@0 F0@1 F1@1 B0@1 P0@0 B1@1 B0@0 B1@0"
    schedule, options = Schedule.parse(text), {"balance": [1, 1], "devices": ["cpu:0"] * 2, "chunks": 2}
    assert str(schedule) == text
    plain = copy.deepcopy(layers)
    with closing(GPipe(layers, checkpoint=["offload", "never"], **options)) as pipe, gpipe.record() as timeline:
        trained(pipe, rows(), schedule)
    assert [str(event) for event in timeline.events] == text.split()
    assert len(moved) == 1  # what tanh returns
    trained(plain, rows())
    assert_same(layers, plain)
    for wrong, message in {
        text.replace("P0@0 ", ""): "B0@0 needs the saved tensors of its cell, which were not prefetched",
        text.replace("O0@0 ", ""): "P0@0, but micro-batch 0 was not offloaded",
        text.replace("O0@0 F1@0", "F1@0 O0@0 O0@0"): "O0@0, but micro-batch 0 has no saved tensors there",
        "F0@0 F1@0 F0@1 O0@1 F1@1 P0@1 B0@1 B1@1 B0@0 B1@0": "O0@1, but stage 1 does not have checkpoint=",
    }.items():
        with pytest.raises(ValueError, match=message):
            trained(pipe, rows(), Schedule.parse(wrong))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer(backend: str) -> None:
    layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2)))
    plain, x = copy.deepcopy(layers), rows(8)
    compiled = nn.Sequential(*(torch.compile(layer, backend=backend) for layer in layers))
    with closing(offloading(compiled)) as pipe:
        trained(pipe, x, "fill_drain")
    trained(plain, x)
    torch.testing.assert_close([p.grad for p in layers.parameters()], [p.grad for p in plain.parameters()])


def test_torch_func_in_layer_raises_with_remedy() -> None:
    layers = nn.Sequential(make("func_inside"), make("tanh"))
    with closing(offloading(layers)) as pipe, pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        trained(pipe, rows(8, WIDTH), "1f1b")
    assert "checkpoint='never'" in "".join(caught.value.__notes__)
