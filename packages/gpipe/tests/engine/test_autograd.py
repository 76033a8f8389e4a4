"""A run is a node in the caller's graph: gradients match the model's, or an error is raised."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe import GPipe

from ..layers import (
    DOUBLE,
    MODES,
    Call,
    Layer,
    assert_same,
    assert_trains_like,
    linears,
    on_backward,
    piped,
    rows,
    trained,
)

each_mode = pytest.mark.parametrize("checkpoint", MODES)

SECOND = "backward through the same run of a pipeline a second time"
NO_GRAD_CALL = r"torch.autograd.grad\(\) and backward\(inputs=...\) cannot go through it"


def twins(model: nn.Sequential, balance: list[int], **options: Any) -> tuple[GPipe, nn.Sequential]:
    return piped(model, balance, **options), model


@each_mode
@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_is_refused(checkpoint: str, retain: bool) -> None:
    pipe, model = twins(linears(), [1, 2], chunks=2, checkpoint=checkpoint)
    loss = pipe(rows(grad=True)).sum()
    loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match=SECOND if retain else "second time"):
        loss.backward()
    model(rows()).sum().backward()
    assert_same(pipe, model)  # the failed backward left nothing behind


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@each_mode
def test_create_graph_is_refused(checkpoint: str) -> None:
    pipe = piped(linears(), [1, 2], chunks=2, checkpoint=checkpoint)
    output = pipe(rows(grad=True))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        output.sum().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in pipe.parameters())


@each_mode
def test_autograd_grad_and_partial_backward_raise(checkpoint: str) -> None:
    """A regular backward of the same run still works after the error."""
    pipe, model = twins(linears(), [1, 2], chunks=2, checkpoint=checkpoint)
    model(rows()).sum().backward()
    for ask in (
        lambda y, x: torch.autograd.grad(y, x, retain_graph=True),
        lambda y, x: y.backward(inputs=[x], retain_graph=True),
        lambda y, x: torch.autograd.grad(y, x, create_graph=True),
    ):
        x = rows(grad=True)
        output = pipe(x)
        with pytest.raises(RuntimeError, match=f"{NO_GRAD_CALL}|cannot be differentiated twice"):
            ask(output.sum(), x)
        assert x.grad is None
        assert all(parameter.grad is None for parameter in pipe.parameters())
        output.sum().backward()
        assert_same(pipe, model)
        pipe.zero_grad()


def test_reentrant_checkpointing_around_the_pipe_works() -> None:
    """Layers may be random: torch restores the state of its generator."""
    around, plain = (piped(nn.Sequential(*linears(), nn.Dropout()), [1, 3], chunks=2) for _ in "ab")
    with torch.random.fork_rng(devices=[]):
        torch_checkpoint(around, rows(grad=True), use_reentrant=True).square().sum().backward()
    plain(rows()).square().sum().backward()
    assert_same(around, plain)


def three_ways() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 9, dtype=DOUBLE),
        Call(lambda h: h.chunk(3, 1)),
        Call(lambda t: (t[0].sin(), t[1].cos(), t[2].detach(), t[2].argmax(1), None, t[2].exp())),
    )


@each_mode
@given(used=st.sets(st.sampled_from([0, 1, 5]), min_size=1))
def test_some_outputs_are_used(checkpoint: str, used: set[int]) -> None:
    model = three_ways()
    pipe = piped(model, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    found = []
    for module in (pipe, model):
        x = rows(grad=True)
        output = module(x)
        sum(output[k].square().sum() for k in used).backward()
        found.append((x.grad, [o if o is None else (o.requires_grad, o.dtype, o.detach()) for o in output]))
    assert_same(pipe, model)
    torch.testing.assert_close(found[0][0], found[1][0])
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours[:2] == theirs[:2]
        assert ours is None or torch.equal(ours[2], theirs[2]) or torch.allclose(ours[2], theirs[2])


@each_mode
@pytest.mark.parametrize("grads", [(False, True), (True, False), (True, True)])
def test_inputs_of_which_some_need_no_gradient(checkpoint: str, grads: tuple[bool, bool]) -> None:
    model = nn.Sequential(Call(lambda t: t[0] * t[1].sin()), *linears(1))
    pipe = piped(model, [1, 1], chunks=3, checkpoint=checkpoint)
    found = []
    for module in (pipe, model):
        inputs = tuple(rows(grad=grad) for grad in grads)
        module(inputs).square().sum().backward()
        found.append([each.grad for each in inputs])
    torch.testing.assert_close(*found)
    assert_same(pipe, model)


@each_mode
def test_a_parameter_handed_to_the_next_stage(checkpoint: str) -> None:
    hand = Layer(lambda s, x: (x, s.weight), weight=nn.Parameter(rows(2)))
    model = nn.Sequential(*linears(1), hand, Call(lambda t: t[0] @ t[1].T * t[1].sum()))
    assert_trains_like(piped(model, [2, 1], chunks=3, checkpoint=checkpoint), model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_mode
def test_without_grad_nothing_is_kept(mode: Callable[[], Any], checkpoint: str) -> None:
    graphs: list[bool] = []
    spy = Call(lambda x: (graphs.append(x.requires_grad), x)[1])
    pipe = piped(nn.Sequential(*linears(1), spy), [1, 1], chunks=2, checkpoint=checkpoint)
    with mode():
        output = pipe(rows())
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)
    assert graphs == [False, False]
    torch.testing.assert_close(output.clone(), linears(1)(rows()))


@pytest.mark.usefixtures("no_collector")
@each_mode
def test_micro_batches_are_freed_after_their_backward(checkpoint: str) -> None:
    """The garbage collector is not needed."""
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Held:
        def __call__(self) -> None: ...

    def keep(x: Tensor) -> Tensor:
        mark = Held()
        held.append(weakref.ref(mark))
        return on_backward(x, mark)

    count = Call(lambda x: on_backward(x, lambda: alive.append(sum(ref() is not None for ref in held))))
    model = nn.Sequential(count, *linears(1), Call(keep), *linears(1))
    pipe = GPipe(model, [3, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    pipe(rows(grad=True)).sum().backward()
    assert alive == [{"always": 1, "except_last": 1, "never": 2, "offload": 2}[checkpoint], 1]


@pytest.mark.parametrize("schedule", [None, "1f1b", "zero_bubble"])
@pytest.mark.parametrize("apart", [False, True])
def test_backward_inside_forward_reaches_earlier_stages(schedule: str | None, apart: bool):
    def inside(s: Layer, x: Tensor) -> Tensor:
        y: Tensor = s.m[0](x)
        y.square().sum().backward(retain_graph=True)
        return y

    def built() -> nn.Sequential:
        first, second, last = linears()
        return nn.Sequential(first, Layer(inside, second), last)

    pipe, plain = piped(built(), [1, 1, 1], chunks=3, checkpoint="never"), built()
    # Gradients of parameters that another graph uses are accumulated outside .grad.
    graph = [parameter * 1 for parameter in pipe.parameters()] if apart else []
    trained(pipe, rows(), schedule)
    trained(plain, rows())
    del graph
    assert_same(pipe, plain)
    pipe.close()
