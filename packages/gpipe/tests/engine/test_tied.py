"""Parameters that several stages share train as in the plain model, whatever shares what."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from gpipe.engine import _tied
from gpipe.module._tied import expect_shareable

from ..layers import (
    DOUBLE,
    MODES,
    Call,
    Layer,
    assert_same,
    assert_trains_like,
    each_way,
    linears,
    rows,
    trained,
    within,
)

HOWS = (None, "1f1b", "fill_drain", "interleaved", "zero_bubble", "auto", "search")


class Tie(NamedTuple):
    """The tensor that a layer shares with an earlier one."""

    what: str
    earlier: int


class Case(NamedTuple):
    """A model and how it is run."""

    ties: tuple[Tie | None, ...]
    frozen: bool
    balance: list[int]
    workers: int
    apart: bool
    how: str | None
    mode: str
    chunks: int
    inline: bool
    watched: str | None = None
    """Observers of the first weight's gradient, hooks or its node: they are called like in the plain model."""
    offload: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    balance = draw(st.lists(st.integers(1, 2), min_size=2, max_size=4))
    ties: list[Tie | None] = [None]
    for k in range(1, sum(balance)):
        tie = st.builds(Tie, st.sampled_from(("weight", "bias", "linear", "weight and bias")), st.integers(0, k - 1))
        ties.append(draw(st.none() | tie))
    return Case(
        tuple(ties),
        frozen=draw(st.booleans()),
        balance=balance,
        workers=(workers := draw(st.integers(1, len(balance)))),
        apart=draw(st.booleans()),
        how=draw(st.sampled_from(HOWS).filter(lambda how: how != "interleaved" or len(balance) % workers == 0)),
        mode=draw(st.sampled_from(MODES)),
        chunks=draw(st.integers(1, 4)),
        inline=draw(st.booleans()),
        watched=draw(st.sampled_from([None, "by hooks", "by its node"])),
        offload=draw(st.booleans()),
    )


def model(ties: tuple[Tie | None, ...], *, frozen: bool = False) -> nn.Sequential:
    """Layers of a linear one and its activation, with ``ties``; the first bias may be frozen."""
    layers = nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears(len(ties))))
    for layer, tie in zip(layers, ties, strict=True):
        if tie is None:
            continue
        other = layers[tie.earlier][0]
        if tie.what == "linear":
            layer[0] = other
        else:
            for name in tie.what.split(" and "):
                setattr(layer[0], name, getattr(other, name))
    layers[0][0].bias.requires_grad_(not frozen)
    return layers


def two_steps(module: nn.Module, how: str | None, watched: str | None) -> list[Any]:
    """Return losses and gradients before and after the first update, and observed gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    weight, node = module[0][0].weight, None
    if watched == "by hooks":
        weight.register_hook(lambda gradient: found.append(gradient.clone()) or gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.clone()))
    elif watched == "by its node":  # as DistributedDataParallel does
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_prehook(lambda gradients: found.append(gradients[0].clone()))
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = trained(module, rows(), how)
        found += [loss, [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()]]
        optimizer.step()
    del node  # held until the end
    return found


def piped(case: Case) -> GPipe:
    places = [f"cpu:{j % case.workers}" for j in range(len(case.balance))]
    layers = model(case.ties, frozen=case.frozen)
    options = {"chunks": case.chunks, "checkpoint": case.mode, "offload": case.offload}
    return GPipe(layers, case.balance, devices=places, **options)


def run(case: Case) -> list[Any]:
    with apart() if case.apart else nullcontext(), gpipe.inline() if case.inline else nullcontext():
        pipe = piped(case)
        found = within(60, lambda: two_steps(pipe, case.how, case.watched))
        pipe.close()
    return found


@contextmanager
def apart() -> Iterator[None]:
    """Make stages copy shared tensors, like stages on different devices."""
    real = _tied.copy_to_device

    def copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        there = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        held = nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
        return real(held, device, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tied, "copy_to_device", copy_to_device)
        yield


@given(cases())
@example(Case((None, Tie("linear", 0)), False, [1, 1], 2, False, "1f1b", "always", 3, False))
@example(Case((None, Tie("weight", 0), Tie("bias", 0)), True, [1, 1, 1], 3, True, "zero_bubble", "never", 2, False))
def test_training_matches_plain_model_and_is_deterministic(case: Case) -> None:
    expected, first = two_steps(model(case.ties, frozen=case.frozen), None, case.watched), run(case)
    torch.testing.assert_close(first, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run(case._replace(inline=not case.inline)), first, rtol=0, atol=0)


places = pytest.mark.parametrize("place", [nullcontext, apart], ids=["together", "apart"])
hows = pytest.mark.parametrize("how", [None, "1f1b"])

TIED = (None, Tie("weight", 0), Tie("linear", 0))


def pipe_of(layers: nn.Sequential, **options: Any) -> GPipe:
    """Return a pipe with one stage per layer."""
    return GPipe(layers, [1] * len(layers), devices=["cpu"] * len(layers), chunks=3, **options)


@places
def test_tied_untied_and_frozen_later(place: Callable[[], Any]) -> None:
    pipe, plain = pipe_of(model((None,) * 3)), model((None,) * 3)
    changes: list[Callable[[nn.Module], Any]] = [
        lambda module: setattr(module[2][0], "weight", module[1][0].weight),
        lambda module: module[1][0].weight.requires_grad_(False),
        lambda module: module[1][0].weight.requires_grad_(True),
        lambda module: setattr(module[2][0], "weight", nn.Parameter(torch.ones(3, 3, dtype=DOUBLE))),
    ]
    with place():
        for change in changes:
            for module in (pipe, plain):
                change(module)
            assert_trains_like(pipe, plain)


@places
@each_way
@hows
def test_a_table_for_words_and_for_logits(place: Any, way: Any, how: str | None) -> None:
    def built(sparse: bool) -> nn.Sequential:
        table = nn.Embedding.from_pretrained(rows(5), freeze=False, sparse=sparse, padding_idx=0)
        return nn.Sequential(table, linears(1)[0], Layer(lambda s, x: x @ s.m[0].weight.T, table))

    words = torch.tensor([[0, 1], [2, 3], [4, 4], [1, 0]])
    for sparse in (False, True):
        with place(), way():
            pipe, plain = pipe_of(built(sparse), checkpoint="always"), built(sparse)
            trained(plain, words)
            trained(pipe, words, how)
            assert_same(pipe, plain)


def counting(change: Callable[[Any], Any], total: float = 0.0, dtype: torch.dtype = DOUBLE) -> nn.Module:
    """Has a buffer that it may modify."""

    def forward(s: Layer, x: Tensor) -> Tensor:
        change(s)
        return x + s.total

    layer = Layer(forward, total=torch.full((1,), total, dtype=dtype), scale=1.0)
    layer.seen = torch.zeros(1)
    return layer


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "in place": (lambda layer: layer.total.add_(1), "'0.0.total' of partition 0 in place"),
    "by assignment": (lambda layer: setattr(layer, "total", layer.total + 1), "'total' of '0.0' of partition 0"),
    "of an attribute": (lambda layer: setattr(layer, "scale", layer.scale + 1), "'scale' of '0.0' of partition 0"),
    "of its data": (
        lambda layer: setattr(layer.total, "data", layer.total.data + 1),
        "'0.0.total' of partition 0 in place",
    ),
    "of a tensor": (lambda layer: layer.seen.add_(1), "'seen' of '0.0' of partition 0"),
}


def shared(what: nn.Module) -> nn.Sequential:
    """A model whose first and last layer contain ``what``."""
    return nn.Sequential(nn.Sequential(what), linears(1)[0], nn.Sequential(what))


@places
@hows
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_stage_changes_is_refused_by_name(place: Any, how: str | None, change: str) -> None:
    function, name = CHANGES[change]
    counts = counting(function)
    pipe = pipe_of(shared(counts), checkpoint="always")
    with place(), pytest.raises(RuntimeError, match=name):
        trained(pipe, rows(), how)
    assert pipe[1].weight.grad is None
    assert pipe[2][0] is counts


@hows
def test_a_module_without_tensors_must_not_change_either(how: str | None) -> None:
    counts = Layer(lambda s, x: (setattr(s, "calls", s.calls + 1), x * s.calls)[1], calls=0)
    with pytest.raises(RuntimeError, match=r"'calls' of '0\.0' of partition 0"):
        trained(pipe_of(shared(counts)), rows(), how)


class Gain(nn.Parameter):
    offset = 2.0


@hows
@pytest.mark.parametrize("kind", [nn.Parameter, Gain])
def test_shared_tensors_keep_class_and_attributes(kind: type[nn.Parameter], how: str | None) -> None:
    def built() -> nn.Sequential:
        weight = kind(rows(3))
        weight.gain = 3.0
        read = [Layer(lambda s, x: x @ s.w * s.w.gain + getattr(s.w, "offset", 0), w=weight) for _ in range(2)]
        return nn.Sequential(read[0], *linears(1), read[1])

    pipe, plain = pipe_of(built()), built()
    torch.testing.assert_close(trained(pipe, rows(), how), trained(plain, rows()))
    assert_same(pipe, plain)


@places
@pytest.mark.parametrize("dtype", [DOUBLE, torch.int64])
def test_a_buffer_that_nobody_changes(place: Any, dtype: torch.dtype) -> None:
    with place():
        pipe, plain = (shared(counting(lambda layer: None, 3, dtype)) for _ in range(2))
        assert_trains_like(pipe_of(pipe), plain)


@hows
def test_renorming_is_refused(how: str | None) -> None:
    table = nn.Embedding(5, 3, max_norm=0.1, dtype=DOUBLE)
    head = nn.Linear(3, 5, bias=False, dtype=DOUBLE)
    head.weight = table.weight
    pipe = pipe_of(nn.Sequential(table, head))
    with pytest.raises(RuntimeError, match=r"'0\.weight' of partition 0 in place"):
        trained(pipe, torch.arange(5), how)


def with_forward(layer: nn.Module) -> nn.Module:
    layer.forward = layer.forward
    return layer


UNSHAREABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(3, dtype=DOUBLE), r"'2\.0\.weight' of partition 2 .* has no shape yet"),
    "compiled": (lambda: torch.compile(linears(1)[0], backend="eager"), r"'2\.0' of partition 2 .* forward was set"),
    "patched": (lambda: with_forward(linears(1)[0]), r"'2\.0' of partition 2 is also '0\.0' of partition 0.* forward"),
    "a pipe": (lambda: pipe_of(linears(1)), r"'2\.0' of partition 2 is also '0\.0' of partition 0, but it is a pipe"),
}


@pytest.mark.parametrize("name", UNSHAREABLE)
def test_what_cannot_be_copied_is_refused_by_name(name: str) -> None:
    made, message = UNSHAREABLE[name]
    with pytest.raises(ValueError, match=message):
        pipe_of(shared(made()))
    GPipe(shared(made()), [3], devices=["cpu"])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_two_partitions_tie_their_weights(kind: type[nn.RNNBase]) -> None:
    def layers(first: nn.Module, last: nn.Module) -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(each, Call(lambda both: both[0])) for each in (first, last)))

    a, b = kind(3, 3, batch_first=True, dtype=DOUBLE), kind(3, 3, batch_first=True, dtype=DOUBLE)
    for name, _ in a.named_parameters():
        setattr(b, name, getattr(a, name))
    # A partition may contain it twice. Two partitions raise, whatever module is around it.
    with pytest.raises(ValueError, match=r"^'1\.0' of partition 1 is also '0\.0' of partition 0, but .*weight_ih_l0"):
        pipe_of(layers(a, a))
    x = rows(24).view(6, 4, 3)
    plain = copy.deepcopy(layers(a, a))
    assert_trains_like(GPipe(layers(a, a), [2], devices=["cpu"], chunks=3), plain, x)
    for place in (nullcontext, apart):
        with place():
            assert_trains_like(pipe_of(layers(a, b)), plain, x)


def views() -> nn.Sequential:
    """The first rows of the second weight are the last of the first."""
    layers, memory = linears(2), rows(4)
    layers[0].weight, layers[1].weight = nn.Parameter(memory[:3]), nn.Parameter(memory[1:])
    return layers


def test_views_raise_on_several_devices() -> None:
    pipe, plain = pipe_of(views()), views()
    for module in (pipe, plain):
        trained(module, rows())
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
    others = [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match=r"'weight' of partition 0 on 'cuda:0' and 'weight' of partition 1"):
        expect_shareable(list(views()), others)
    expect_shareable(list(model(TIED)), [*others, torch.device("cpu")])
    expect_shareable([layer.requires_grad_(False) for layer in views()], others)


@pytest.mark.parametrize(
    ("schedule", "reduction"), [("1f1b", "mean"), ("zero_bubble", "mean"), (None, None), ("fill_drain", None)]
)
@pytest.mark.parametrize("known", [True, False])
def test_loss_over_shared_parameters(schedule: str | None, reduction: str | None, known: bool) -> None:
    """A step would count copies as well. In evaluation there are none on the same device."""
    model = nn.Sequential(*linears(2))
    model[1].weight = model[0].weight
    pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2)
    parameters = [*pipe.parameters()]

    def penalty(output: Tensor) -> Tensor:
        return output.square().mean() + sum(
            each.square().sum() for each in (parameters if known else pipe.parameters())
        )

    expected = penalty(model(rows()))
    torch.testing.assert_close(pipe.evaluate(rows(), loss_fn=penalty), expected)
    with nullcontext() if known else pytest.raises(RuntimeError, match="loss_fn goes over parameters or modules"):
        found = pipe.step(rows(), loss_fn=penalty, reduction=reduction, schedule=schedule)
        torch.testing.assert_close(found, expected)
