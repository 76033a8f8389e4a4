"""Several threads on one pipe, pipes inside pipes, and forks in the middle of it all."""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.streams.tests.fakes import in_child
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.engine._run_lock import RunLock

from ..layers import (
    ALL_ROWS,
    Call,
    assert_same,
    assert_trains_like,
    counted,
    each_way,
    linears,
    on_backward,
    piped,
    rows,
    started,
    trained,
)

Way = Callable[[], AbstractContextManager[None]]


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run ``works`` concurrently, each on a new thread, and return their results."""
    meeting = threading.Barrier(len(works))
    futures = [started(lambda work=work: (meeting.wait(300), work())[1]) for work in works]
    return [future.result(300) for future in futures]


HOWS = [None, "1f1b", "fill_drain", "zero_bubble", "counted", ALL_ROWS]


def train(pipe: nn.Module, how: str | None, x: Tensor) -> None:
    """Add the gradients of one mini-batch."""
    trained(pipe, x, *(["1f1b", counted] if how == "counted" else [how]))


@each_way
@settings(max_examples=12)
@given(
    hows=st.lists(st.lists(st.sampled_from(HOWS), min_size=1, max_size=4), min_size=2, max_size=3),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    hooked=st.booleans(),
    shared=st.booleans(),
    stages=st.integers(1, 3),
)
def test_threads_training_one_pipe_add_gradients(
    way: Way, hows: list[list[str | None]], checkpoint: str, hooked: bool, shared: bool, stages: int
) -> None:
    model = linears(3)
    pipe = piped(model, [1] * (stages - 1) + [4 - stages], chunks=3, checkpoint=checkpoint)
    seen: list[Tensor] = []
    if hooked:
        pipe[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for module in (pipe, model):
        module[1].weight.grad = torch.ones_like(module[1].weight)
    inputs = [rows() if shared else rows() * (k + 1) for k in range(len(hows))]

    def work(k: int) -> None:
        with way():
            for how in hows[k]:
                train(pipe, how, inputs[k])

    at_once(*[lambda k=k: work(k) for k in range(len(hows))])
    for k, mine in enumerate(hows):
        for how in mine:
            train(model, how, inputs[k])
    assert_same(pipe, model)
    if hooked:
        # Gradients that arrive while a different run has removed the hooks are reported together with that run's.
        assert 1 <= len(seen) <= sum(map(len, hows))
        torch.testing.assert_close(torch.stack(seen).sum(0), model[0].weight.grad)
    pipe.close()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed here")
def test_threads_are_refused_where_autograd_adds_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a process group, and perhaps a DistributedDataParallel."""
    pipe = piped(linears(), [1, 2], chunks=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    earlier, output = pipe(rows()), pipe(rows())  # the first graph refers to the nodes of the parameters
    ran, seen = threading.Event(), threading.Event()

    def another() -> None:
        pipe(rows())
        ran.set()
        assert seen.wait(300)

    def train() -> None:
        assert ran.wait(300)
        try:
            with pytest.raises(RuntimeError, match="several threads train this pipe"):
                output.sum().backward()
        finally:
            seen.set()

    at_once(another, train)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    earlier.sum().backward()
    again = linears()
    again(rows()).sum().backward()
    assert_same(pipe, again)


@each_way
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shared", [True, False])
def test_pipes_sharing_parameter_cannot_train_concurrently(way: Way, how: str | None, shared: bool) -> None:
    inside, tried = threading.Event(), threading.Event()

    def slow(gradient: Tensor) -> None:
        inside.set()
        assert tried.wait(300)

    first, second = linears(2), linears(2)
    layer = Call(lambda x: on_backward(x, lambda: slow(x)))
    one = GPipe(nn.Sequential(first[0], layer, first[1]), [1, 2], devices=["cpu"] * 2)
    other = GPipe(nn.Sequential(first[0] if shared else second[0], second[1]), [1, 1], devices=["cpu"] * 2)

    def work() -> None:
        with way():
            train(one, how, rows())

    def meanwhile() -> None:
        assert inside.wait(300)
        refused = pytest.raises(RuntimeError, match="another thread is training another pipe")
        try:
            with way(), refused if shared else nullcontext():
                train(other, how, rows())
        finally:
            tried.set()

    at_once(work, meanwhile)
    wanted = linears(2)
    train(nn.Sequential(*wanted), how, rows())
    torch.testing.assert_close(first[0].weight.grad, wanted[0].weight.grad)


def test_threads_may_enter_and_leave_different_pipes() -> None:
    """One of them is being compared with a third pipe."""
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    class Third(RunLock):
        __hash__ = RunLock.__hash__

        def __eq__(self, other: object) -> bool:
            if entered.is_set():
                leave.set()
                assert left.wait(300)
            return self is other

    def work(run_lock: RunLock, inside: Callable[[], Any]) -> None:
        run_lock.run(lambda: (run_lock.claim([torch.zeros(1)]), inside()))

    def enter_and_leave() -> None:
        work(RunLock(), lambda: (entered.set(), leave.wait(300)))
        left.set()

    def others() -> None:
        leaving = started(enter_and_leave)
        assert entered.wait(300)
        started(lambda: work(RunLock(), lambda: None)).result(300)
        leaving.result(300)

    work(Third(), others)


@each_way
def test_threads_may_evaluate_one_pipe_at_once(way: Way) -> None:
    model = linears(3)
    pipe = piped(model, [1, 2], chunks=3)

    def evaluate(k: int) -> list[Tensor]:
        with way(), torch.no_grad():
            return [pipe(rows() * k) for _ in range(10)]

    for k, outputs in enumerate(at_once(*[lambda k=k: evaluate(k) for k in range(4)])):
        for output in outputs:
            torch.testing.assert_close(output, model(rows() * k).detach())


def calling(what: Callable[[Tensor], Any]) -> GPipe:
    return GPipe(nn.Sequential(*linears(1), Call(what)), [1, 1], devices=["cpu"] * 2, chunks=2)


@each_way
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_a_circle_of_pipes_is_refused(way: Way, length: int, grad: bool) -> None:
    pipes: list[GPipe] = []
    pipes += [calling(lambda x, k=k: pipes[(k + 1) % length](x)) for k in range(length)]

    def run() -> None:
        with way(), torch.set_grad_enabled(grad):
            pipes[0](rows())

    with pytest.raises(RuntimeError, match="calls the pipe itself, or another pipe whose layers do"):
        started(run).result(300)


@each_way
@pytest.mark.parametrize("trains", [True, False])
def test_a_loss_that_calls_the_pipe_is_refused(way: Way, trains: bool) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)

    def run() -> None:
        with way():
            compute = pipe.step if trains else pipe.evaluate
            compute(rows(), rows(), loss_fn=lambda output, target: (output - pipe(target)).sum())

    with pytest.raises(RuntimeError, match="loss function"):
        started(run).result(300)


@each_way
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_layers_on_two_stages_may_share_a_pipe(way: Way, checkpoint: str) -> None:
    inner_model, outer_model = linears(2), linears(2)
    inner = piped(inner_model, [1, 1], chunks=2, checkpoint=checkpoint)

    def around(layer: nn.Module) -> nn.Sequential:
        first, second = linears(2)
        return nn.Sequential(first, Call(lambda x: layer(x)), second, Call(lambda x: layer(x)))

    outer = GPipe(around(inner), [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    outer_model = around(inner_model)

    def run() -> None:
        with way():
            trained(outer, rows())

    started(run).result(300)
    trained(outer_model, rows())
    assert_same(inner, inner_model)
    assert_same(outer, outer_model)


@each_way
def test_parameter_hook_may_call_the_pipe(way: Way) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    outputs: list[Tensor] = []
    pipe[0].weight.register_hook(lambda gradient: outputs.append(pipe(rows()).detach()) or gradient)

    def run() -> None:
        with way():
            pipe(rows()).sum().backward()

    started(run).result(300)
    torch.testing.assert_close(outputs, [linears()(rows()).detach()])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@each_way
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("use", [lambda pipe: pipe(rows()), lambda pipe: trained(pipe, rows(), "1f1b")])
def test_child_forked_during_run_raises(way: Way, where: str, use: Callable[[GPipe], Any]) -> None:
    """A process is forked while another thread is in a run, and the child uses the pipe."""
    reached, done = threading.Event(), threading.Event()
    parent = os.getpid()

    def wait() -> None:
        if os.getpid() == parent:
            reached.set()
            assert done.wait(300)

    def layer(x: Tensor) -> Tensor:
        if where == "forward":
            wait()
        return on_backward(x, wait) if where == "backward" else x

    pipe = GPipe(nn.Sequential(*linears(1), Call(layer)), [1, 1], devices=["cpu"] * 2, chunks=2)

    def train() -> None:
        with way():
            pipe(rows()).sum().backward()

    def fork() -> str:
        assert reached.wait(300)
        try:
            return in_child(lambda: started(lambda: use(pipe)).result(300))
        finally:
            done.set()

    answer: str = at_once(fork, train)[0]
    assert "RuntimeError('this process was forked while another thread" in answer
    pipe.zero_grad()
    assert_trains_like(pipe, nn.Sequential(*linears(1)))
