"""Stages whose parameters are on the host train as the plain model; more in test_tied.py and tests/simulated."""

import copy
import weakref
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from gpipe.schedule import Schedule

from ..layers import (
    DOUBLE,
    MODES,
    Call,
    Layer,
    assert_same,
    assert_trains_like,
    linears,
    on_backward,
    rows,
    running,
    trained,
    within,
)
from ..model.residuals import Residuals

HOWS = (None, "1f1b", "fill_drain", "looped_bfs", "zero_bubble")


def offloaded(layers: nn.Module, stages: int | None = None, **options: Any) -> GPipe:
    """Stages of one worker, so that most of them are unloaded at any time."""
    if stages is None:
        stages, options = len(layers), {"balance": [1] * len(layers), **options}
    return GPipe(layers, devices=["cpu:0"] * stages, **{"offload": True, "chunks": 3, **options})


@given(
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from(HOWS),
    st.sampled_from(MODES),
    st.integers(1, 4),
    st.booleans(),
    st.sets(st.integers(0, 4)),
)
def test_it_trains_like_the_same_pipe_without(
    count: int, dtype: torch.dtype, how: str | None, mode: str, chunks: int, inline: bool, frozen: set[int]
) -> None:
    """Bit for bit, in each dtype, if the order of micro-batches is the same."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(count))).to(dtype)
    for k in frozen & {*range(count)}:
        plain[k].requires_grad_(False)
    x, found = rows().to(dtype).requires_grad_(), []
    for offload in (False, True):
        options = {"devices": ["cpu:0"] * count, "chunks": chunks, "checkpoint": mode, "offload": offload}
        with closing(GPipe(copy.deepcopy(plain), [1] * count, **options)) as pipe, running(inline):
            for _ in range(2):
                pipe.zero_grad()
                found.append(within(60, partial(trained, pipe, x, how)))
            found.append([each.grad for each in pipe.parameters()])
    torch.testing.assert_close(found[:3], found[3:], rtol=0, atol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "1f1b", "whole", "zero_bubble"])
@pytest.mark.parametrize("ties", [False, True])
def test_the_forward_of_a_model(ties: bool, how: str, mode: str) -> None:
    """There are operations between blocks, and a weight shared by the first and last stages."""
    model = Residuals(*(nn.Linear(3, 3, dtype=DOUBLE) for _ in range(5)))
    if ties:
        model.head.weight = model.embed.weight
    plain, x = copy.deepcopy(model), rows(6)
    with closing(offloaded(model, 4, checkpoint=mode)) as pipe:
        for _ in range(2):
            for each in (pipe, plain):
                each.zero_grad()
            stepped(pipe, x, how)
            plain(x).square().sum().backward()
            assert_same(model, plain)
            for each in (model, plain):
                torch.optim.SGD(each.parameters(), lr=0.1).step()


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from(HOWS),
    st.sampled_from(MODES),
    st.booleans(),
    st.sets(st.integers(0, 3)),
)
def test_stages_compute_in_another_dtype(
    home: torch.dtype, dtype: torch.dtype, how: str | None, mode: str, ties: bool, frozen: set[int]
) -> None:
    """Bit for bit as a pipe of the cast model, whose gradients are cast back."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))).to(home)
    if ties:
        plain[3][0].weight = plain[0][0].weight
    for k in frozen:
        plain[k][0].bias.requires_grad_(False)
    options = {"devices": ["cpu:0"] * 4, "chunks": 2, "checkpoint": mode}
    cast = copy.deepcopy(plain).to(dtype)
    x, found = rows().to(dtype), []
    with (
        closing(GPipe(cast, [1] * 4, **options)) as there,
        closing(GPipe(plain, [1] * 4, offload=dtype, **options)) as p,
    ):
        for pipe in (there, p):
            for _ in range(2):
                pipe.zero_grad()
                found.append(within(60, partial(trained, pipe, x, how)))
    assert all(each.dtype is home for each in plain.parameters())
    gradients = [each.grad if each.grad is None else each.grad.to(home) for each in cast.parameters()]
    # A tied weight adds the gradients of its stages at home, where they are not rounded.
    exact = {} if ties else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)
    torch.testing.assert_close([each.grad for each in plain.parameters()], gradients, **(exact or APART))


APART = {"rtol": 0.02, "atol": 0.02}


@pytest.mark.parametrize("how", ["call", "1f1b", "whole", "zero_bubble"])
@pytest.mark.parametrize("ties", [False, True])
def test_the_forward_of_a_model_in_another_dtype(ties: bool, how: str) -> None:
    """Operations between blocks and a full-batch loss see parameters in the dtype of the stages."""
    model = Residuals(*(nn.Linear(3, 3, dtype=DOUBLE) for _ in range(5)))
    if ties:
        model.head.weight = model.embed.weight
    plain, x = copy.deepcopy(model).float(), rows(6).float()
    with closing(offloaded(model, 4, offload=torch.float32)) as pipe:
        stepped(pipe, x, how)
        plain(x).square().sum().backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad.double(), rtol=1e-5, atol=1e-5)


def stepped(pipe: GPipe, x: Tensor, how: str) -> None:
    """Compute gradients by a call, by a full-batch loss ("whole"), or under a schedule."""
    if how == "call":
        pipe(x).square().sum().backward()
    else:
        reduction = None if how == "whole" else "sum"
        schedule = None if how == "whole" else how
        pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction=reduction, schedule=schedule)


def test_parameters_are_on_device_only_while_loaded() -> None:
    """Layers use a copy that is freed after the step. All other code has the parameter itself."""
    seen: list[Tensor] = []
    layers = nn.Sequential(
        *(Layer(lambda s, x: (seen.append(s.w), x * s.w)[1], w=nn.Parameter(rows(3)[0])) for _ in range(4))
    )
    homes = [layer.w for layer in layers]
    pipe = offloaded(layers, chunks=1)
    trained(pipe, rows(), "1f1b")
    assert len(seen) == 4
    for home, guest, layer in zip(homes, seen, layers, strict=True):
        assert layer.w is home
        assert guest is not home
        assert guest.data_ptr() == home.data_ptr()  # for code that still refers to it
        assert home.grad is not None
        assert guest.grad is None


def test_optimizer_and_state_dict_work_unchanged() -> None:
    pipe, plain = offloaded(linears(4)), linears(4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (pipe, plain)]
    for _ in range(3):
        for each, optimizer in zip((pipe, plain), optimizers, strict=True):
            optimizer.zero_grad()
            trained(each, rows())
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
    pipe.load_state_dict(linears(4).state_dict())
    assert_trains_like(pipe, linears(4))


@pytest.mark.parametrize("how", ["call", "1f1b"])
def test_layer_modifying_parameter_raises(how: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            s.w.mul_(0.5)
        return x * 2

    layers = nn.Sequential(linears(1)[0], Layer(forward, w=nn.Parameter(rows(1)[0])), linears(1)[0])
    with pytest.raises(RuntimeError, match=r"a layer changed '1\.w' of partition 1 in place, which is on the host"):
        trained(offloaded(layers, checkpoint="never"), rows(), None if how == "call" else how)


@pytest.mark.parametrize("mode", MODES)
def test_parameter_changed_before_backward_raises(mode: str) -> None:
    """Autograd raises in the plain model, because the graph would see the change."""
    pipe = offloaded(nn.Sequential(*(nn.Sequential(each, nn.Tanh()) for each in linears(4))), checkpoint=mode)
    output = pipe(rows())
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="changed"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_failure_leaves_parameters_on_host(mode: str) -> None:
    """A layer of a late stage fails in its first or a later micro-batch, or in a backward."""

    def fail() -> None:
        raise ValueError("in a backward")

    def forward(s: Any, x: Tensor) -> Tensor:
        s.calls.append(1)
        if len(s.calls) == s.fails:
            raise ValueError("in a forward")
        return on_backward(x, fail) if s.fails == 0 else x

    for fails in (0, 1, 2):
        broken = Layer(forward, fails=fails, calls=[])
        layers = nn.Sequential(*linears(2), broken, *linears(1))
        pipe, homes = offloaded(layers, checkpoint=mode), [*layers.parameters()]
        with pytest.raises(ValueError, match=r"in a (for|back)ward"):
            trained(pipe, rows(), "fill_drain")
        assert all(a is b for a, b in zip(homes, pipe.parameters(), strict=True))
        assert all(home.grad is None for home in homes)
        broken.fails = -1
        trained(pipe, rows(), "fill_drain")
        assert all(home.grad is not None for home in homes)
        pipe.close()


def test_schedule_may_contain_loads() -> None:
    text = """L0@0 F0@0 F1@0 U0@0 L0@1 F0@1 F1@1 B1@1 B0@1 U0@1 L1@0 B1@0 B0@0 U1@0"""
    pipe, plain = offloaded(linears(2), chunks=2, checkpoint="never"), linears(2)
    schedule = Schedule.parse(text)
    assert str(schedule) == text
    with gpipe.record() as timeline:
        trained(pipe, rows(), schedule)
    trained(plain, rows())
    assert_same(pipe, plain)
    assert [f"{event}" for event in timeline.events] == text.split()
    with pytest.raises(ValueError, match="F1@0 needs the parameters of stage 0, which are not loaded"):
        trained(pipe, rows(), Schedule.parse(text.replace("F1@0 U0@0", "U0@0 F1@0")))
    with pytest.raises(ValueError, match="L0@0, but the parameters of stage 0 are not offloaded"):
        trained(GPipe(linears(2), [1, 1], devices=["cpu:0"] * 2, chunks=2, checkpoint="never"), rows(), schedule)


SOURCES: dict[str, Callable[[nn.Module], Any]] = {"a state dict": nn.Module.state_dict, "reset": lambda model: "reset"}


@pytest.mark.parametrize("source", SOURCES)
def test_meta_model_is_initialized_on_host(source: str) -> None:
    plain = linears(3)
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(3, 3, dtype=DOUBLE) for _ in range(3)))
    pipe = offloaded(layers, init=SOURCES[source](plain))
    assert all(parameter.is_cpu for parameter in pipe.parameters())
    plain.load_state_dict(pipe.state_dict())
    assert_trains_like(pipe, plain)


def test_a_lazy_layer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'1\\.weight' of partition 1 has no shape yet, but offload=True"):
        offloaded(nn.Sequential(*linears(1), nn.LazyLinear(3, dtype=DOUBLE)))


class Plain(Tensor):
    pass


def test_a_parameter_of_another_class_of_tensors() -> None:
    layers, plain = linears(3), linears(3)
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Plain))
    assert_trains_like(offloaded(layers), plain)


@pytest.mark.parametrize("value", [None, "yes", 2, torch.int8])
def test_offload_must_be_flag_or_dtype(value: Any) -> None:
    with pytest.raises(TypeError, match="offload must be True, False, or the floating-point dtype"):
        GPipe(linears(1), [1], devices=["cpu"], offload=value)


class Weight(nn.Module):
    """Returns something derived from its weight, together with its output."""

    def __init__(self, given: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.given = nn.Linear(3, 3, dtype=DOUBLE), given

    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        x, weight = value if isinstance(value, tuple) else (value, None)
        y = self.linear(x)
        return (y if weight is None else y + weight.sum(0)), self.given(self.linear.weight)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.t(),
    "detached": lambda weight: weight.detach(),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", ["call", "1f1b", "looped_bfs"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("view", VIEWS)
def test_returned_views_of_weight_stay_valid(view: str, mode: str, how: str) -> None:
    layers = nn.Sequential(*(Weight(VIEWS[view]) for _ in range(4)), Call(lambda both: both[0]))
    plain, x = copy.deepcopy(layers), rows(6)
    with closing(offloaded(layers, checkpoint=mode)) as pipe:
        for _ in range(2):
            torch.testing.assert_close(trained(pipe, x, None if how == "call" else how), trained(plain, x))
        assert_same(pipe, plain)


class Latent(nn.Module):
    """Uses a view of its parameter, and outputs of blocks that are views, between later blocks."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.latent = nn.Parameter(torch.ones(1, 3, dtype=DOUBLE))
        self.layers = nn.ModuleList(Weight(VIEWS["a view"]) for _ in range(4))
        self.frozen = nn.Parameter(torch.full((3,), 2.0, dtype=DOUBLE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide, kept = self.latent.expand(len(x), -1), []
        for layer in self.layers:
            x, weight = layer(x)
            kept.append(weight)
            x = x.tanh() * self.frozen + wide
        return x * wide + (sum(each.sum() for each in kept) if self.keeps else 0)


@pytest.mark.parametrize("how", ["call", "1f1b", "whole"])
@pytest.mark.parametrize("mode", MODES)
def test_views_between_blocks_outlive_their_parameters(mode: str, how: str) -> None:
    torch.manual_seed(0)
    model, x = Latent(keeps=how == "1f1b"), rows(6)  # else it is not known where the rows of a weight are
    plain = copy.deepcopy(model)
    with closing(offloaded(model, 4, checkpoint=mode)) as pipe:
        for _ in range(2):
            if how == "call":
                pipe(x).square().sum().backward()
            elif how == "whole":
                pipe.step(x, loss_fn=lambda y: y.square().sum())
            else:
                pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=how)
            plain(x).square().sum().backward()
        assert_same(model, plain)


def test_stored_views_of_weights_do_not_crash(caplog: pytest.LogCaptureFixture) -> None:
    """The weight itself becomes the parameter after the step. For a view, a warning says that it is freed."""

    def forward(s: Any, x: Tensor) -> Tensor:
        s.seen[:] = [s.m[0].weight, s.m[0].weight.t()[1:]]
        return s.m[0](x)

    layers = nn.Sequential(*(Layer(forward, each, seen=[]) for each in linears(3)))
    pipe, optimizer = offloaded(layers), torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(3):
        trained(pipe, rows(), "1f1b")
        before = [layer.seen[1].sum() for layer in layers]
        optimizer.step()
        for layer, view in zip(layers, before, strict=True):
            assert torch.equal(layer.seen[0], layer.m[0].weight)
            assert torch.equal(layer.seen[1].sum(), view)
    assert caplog.text.count("a layer keeps a view of a parameter of shape (3, 3)") == 9


@pytest.mark.parametrize("how", ["call", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("mode", MODES)
def test_the_weight_of_another_stage_is_refused(mode: str, how: str) -> None:
    """A stage may use only its own parameters; the ones in a list are not registered."""
    layers = linears(5)
    first = [layers[0]]
    layers[3] = Layer(lambda s, x: s.m[0](x) @ first[0].weight, layers[3])
    pipe = offloaded(layers, checkpoint=mode)
    with pytest.raises(RuntimeError, match=r"parameter of shape \(3, 3\) that belongs to another partition"):
        trained(pipe, rows(), None if how == "call" else how)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "data": lambda model: setattr(model[1].weight, "data", torch.ones(3, 3, dtype=DOUBLE)),
    "a vector": lambda model: nn.utils.vector_to_parameters(torch.arange(48, dtype=DOUBLE) / 48, model.parameters()),
    "a dtype and back": lambda model: model.to(torch.float32).to(DOUBLE),
    "a parameter": lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(3, 3, dtype=DOUBLE))),
    "an attribute": lambda model: setattr(model[2].w, "gain", 3.0),
    "frozen": lambda model: model[1].requires_grad_(False),
    "loaded": lambda model: model.load_state_dict(
        {key: torch.ones_like(value) for key, value in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps_are_seen(change: str) -> None:
    def built() -> nn.Sequential:
        torch.manual_seed(0)
        gain = Layer(lambda s, x: x * s.w * getattr(s.w, "gain", 1.0), w=nn.Parameter(torch.ones(12, dtype=DOUBLE)[:3]))
        return nn.Sequential(*linears(2), gain, *linears(1)) if change != "a vector" else linears(4)

    pipe, plain = offloaded(built()), built()
    assert_trains_like(pipe, plain)
    for each in (pipe, plain):
        CHANGES[change](each)
        each.zero_grad()
    assert_trains_like(pipe, plain)


class Other(nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [nn.Parameter, Other])
@pytest.mark.parametrize(
    "strided",
    [lambda w: w, lambda w: w.t(), lambda w: torch.cat([w, w])[::2], lambda w: torch.stack([w, w], 2)[..., 0]],
    ids=["dense", "transposed", "every second row", "every second element"],
)
def test_weights_of_any_strides_and_class(strided: Callable[[Tensor], Tensor], kind: type[nn.Parameter]) -> None:
    layers = linears(3)
    for layer in layers:
        layer.weight = kind(strided(layer.weight.detach()))
    plain = copy.deepcopy(layers) if kind is nn.Parameter else linears(3)
    if kind is Other:
        for layer, own in zip(plain, layers, strict=True):
            layer.weight = nn.Parameter(own.weight.detach().clone().as_subclass(Tensor))
    assert_trains_like(offloaded(layers), plain)


def test_a_replaced_parameter_is_freed() -> None:
    pipe = offloaded(linears(3))
    trained(pipe, rows())
    before = weakref.ref(pipe[1].weight)
    pipe[1].weight = nn.Parameter(torch.ones(3, 3, dtype=DOUBLE))
    trained(pipe, rows())
    assert before() is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_first(context: Any) -> None:
    pipe, plain = offloaded(linears(3)), linears(3)
    with context():
        torch.testing.assert_close(pipe(rows()), plain(rows()))
    assert_trains_like(pipe, plain)
    with context():
        torch.testing.assert_close(pipe(rows()), plain(rows()))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "1f1b", "looped_bfs", "zero_bubble"])
def test_on_a_gpu(how: str, mode: str) -> None:
    """Parameters are updated between steps, and at most two stages are on the device."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, dtype=DOUBLE), nn.Tanh()) for _ in range(8)))
    plain, x = copy.deepcopy(layers), torch.randn(32, 512, dtype=DOUBLE)
    pipe = GPipe(layers, [1] * 8, devices=["cuda:0"] * 8, chunks=4, checkpoint=mode, offload=True)
    assert all(parameter.is_pinned() for parameter in pipe.parameters())
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        trained(pipe, x.cuda(), None if how == "call" else how)
        most = torch.cuda.max_memory_allocated() - before
        trained(plain, x)
        assert_same(pipe, plain)
        for each in (pipe, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        if how == "looped_bfs" and mode == "always":
            assert most < 5 * 512 * 512 * 8 + 40 * x.nbytes
    pipe.close()
