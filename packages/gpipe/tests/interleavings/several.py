"""Programs with several callers or several pipes, or with pipes that other threads close or free."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from packages.streams.tests.interleavings.objects import active
from packages.streams.tests.interleavings.scheduler import InjectedError
from torch import Tensor, nn

from gpipe import GPipe
from gpipe._current import doing
from gpipe._torch import attention_settings
from gpipe.checkpoint import _attention
from gpipe.checkpoint._random import CellRNG, RunRNG
from gpipe.model._generators import Drawing, Numbers, generator_states
from streams import waiting

from ..layers import Row, linear, rows, squares, trained
from .scenarios import (
    assert_no_threads,
    certain,
    certain_until,
    close,
    expect,
    expect_gradients,
    expect_nothing_left,
    model_of,
    plain,
    point,
    points,
    running,
)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run the first of ``works`` in this thread and the others in new ones. Return their results or exceptions."""
    outcomes: list[Any] = [None] * len(works)
    ended = [waiting.Event() for _ in works]

    def run(k: int) -> None:
        try:
            outcomes[k] = works[k]()
        except (Exception, KeyboardInterrupt) as error:
            outcomes[k] = error
        finally:
            if k:
                ended[k].set()

    threads = [waiting.Thread(target=run, args=[k]) for k in range(1, len(works))]
    for thread in threads:
        with suppress(KeyboardInterrupt):  # the thread has started before it can be interrupted
            thread.start()
    run(0)
    for wait in [*(each.wait for each in ended[1:]), *(thread.join for thread in threads)]:
        with suppress(KeyboardInterrupt):
            wait()
            continue
        wait()  # again after an interrupt
    return outcomes


def new_pipe(model: nn.Module, balance: tuple[int, ...] = (2, 2), **options: Any) -> GPipe:
    defaults = {"devices": ["cpu"] * len(balance), "chunks": 2, "checkpoint": "never"}
    with certain():
        return GPipe(model, list(balance), **{**defaults, **options})


def expect_right(*pipes: GPipe, model: Callable[[], nn.Module], schedule: str | None) -> None:
    """Expect the next step of each pipe to have the gradients of the plain model."""
    _, expected = plain(model, None, squares, 4)
    for pipe in pipes:
        pipe.zero_grad()
        with certain(), running(pipe):
            trained(pipe, rows(4), schedule)
        expect_gradients(pipe, expected, failed=False)
    expect_nothing_left(pipes[0])
    for pipe in pipes:
        close(pipe)
    assert_no_threads()


def expect_injected(outcomes: list[Any]) -> int:
    """Return the number of injected failures and interrupts. Raise any other error."""
    failed = [each for each in outcomes if isinstance(each, BaseException)]
    for each in failed:
        if not isinstance(each, (InjectedError, KeyboardInterrupt)):
            raise each
    return len(failed)


def two_callers(schedule: str | None, other: str | None) -> None:
    """Train the same pipe in two threads. Their gradients are added."""
    create = points(2)
    model, expected = plain(create_2, None, squares, 4)
    del create
    pipe = new_pipe(copy.deepcopy(model))
    outcomes = together(
        lambda: trained(pipe, rows(4), schedule) and None, lambda: trained(pipe, rows(4), other) and None
    )
    if not expect_injected(outcomes):
        twice = {name: None if each is None else 2 * each for name, each in expected.items()}
        expect_gradients(pipe, twice, failed=False)
    expect_nothing_left(pipe)
    expect_right(pipe, model=create_2, schedule=schedule)


create_2 = points(2)
create_4 = points(4)


def two_pipes(schedule: str | None) -> None:
    """Train two pipes, each in its own thread."""
    model, expected = plain(create_2, None, squares, 4)
    pipes = [new_pipe(copy.deepcopy(model)) for _ in range(2)]
    outcomes = together(*(lambda pipe=pipe: trained(pipe, rows(4), schedule) and None for pipe in pipes))
    for pipe, outcome in zip(pipes, outcomes, strict=True):
        failed = expect_injected([outcome]) > 0
        if not failed or schedule is not None:  # otherwise, as after a failed backward of a plain model
            expect_gradients(pipe, expected, failed=failed)
    expect_nothing_left(pipes[0])
    expect_right(*pipes, model=create_2, schedule=schedule)


def shared_parameters() -> None:
    """Train two pipes of the same layers in two threads with different data. One of them may raise an error.

    A hook receives the complete gradient of one of the steps. The other thread may continue in the last layer.
    """
    model, expected = plain(create_2, None, squares, 4)
    layers = [*copy.deepcopy(model), Pauses()]
    pipes = [new_pipe(nn.Sequential(*layers), (2, 3)) for _ in range(2)]
    calls: list[Tensor] = []
    handle = layers[0].weight.register_hook(calls.append)  # type: ignore[union-attr,operator]
    data = rows(4), -2 * rows(4)
    outcomes = together(
        *(lambda pipe=pipe, x=x: trained(pipe, x, "1f1b") and None for pipe, x in zip(pipes, data, strict=True))
    )
    whole = [plain_gradients(copy.deepcopy(model), x) for x in data]
    is_refused = ["another thread is training another pipe" in str(each) for each in outcomes]
    assert not all(is_refused), "both are refused"
    done = [k for k in range(2) if not is_refused[k]]
    if not expect_injected([outcomes[k] for k in done]):
        sums = {name: sum(whole[k][name] for k in done) for name in expected}  # type: ignore[misc]
        expect_gradients(pipes[0], sums, failed=False)
    for gradient in calls:
        right = any(torch.allclose(gradient, whole[k]["0.weight"]) for k in done)  # type: ignore[arg-type]
        assert right, "a hook has received a mixture of the gradients of two steps"
    handle.remove()
    expect_right(*pipes, model=create_2, schedule="1f1b")


class Pauses(nn.Module):
    """The identity, in which other threads may continue without a preemption."""

    def forward(self, x: Tensor) -> Tensor:
        point("a pause", pause=True)
        return x * 1


def plain_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    with certain():
        trained(model, x)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Around(nn.Module):
    """A layer that calls a pipe or a different module, without having it as a submodule."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        point("before the inner pipe")
        found: Tensor = self.inner[0](x)
        return found


def nested() -> None:
    """Train a pipe with a layer that calls a pipe."""
    model, _ = plain(create_2, None, squares, 4)
    inner = new_pipe(copy.deepcopy(model))
    outer = new_pipe(nn.Sequential(linear(), linear(), Around(inner), linear()))
    outcomes = together(lambda: trained(outer, rows(4), "1f1b") and None)
    expect_injected(outcomes)
    close(outer)
    expect_nothing_left(outer)
    expect_right(inner, model=create_2, schedule="1f1b")


def nested_and_inner() -> None:
    """Train a pipe with a layer that calls a pipe, while another thread trains the inner pipe."""
    model, _ = plain(create_2, None, squares, 4)
    inner = new_pipe(copy.deepcopy(model))
    outer = new_pipe(nn.Sequential(linear(), linear(), Around(inner), linear()))
    outcomes = together(lambda: trained(outer, rows(4), None) and None, lambda: trained(inner, rows(4), None) and None)
    refused = [each for each in outcomes if isinstance(each, RuntimeError)]
    for each in refused:
        assert "another thread is training" in str(each), each
    expect_injected([each for each in outcomes if each not in refused])
    close(outer)
    expect_nothing_left(outer)
    expect_right(inner, model=create_2, schedule="1f1b")


def each_other() -> None:
    """Run two pipes whose layers call the other pipe in two threads. One of them must raise instead of waiting."""
    first, second = Around(None), Around(None)
    pipes = [new_pipe(nn.Sequential(linear(), linear(), each, linear())) for each in (first, second)]
    calls = [0, 0]

    def once(k: int) -> Any:
        def call(x: Tensor) -> Tensor:
            calls[k] += 1
            with torch.no_grad():
                return pipes[1 - k](x) if calls[k] < 2 else x

        return call

    first.inner[0], second.inner[0] = once(0), once(1)
    with torch.no_grad():
        pass
    outcomes = together(*(lambda pipe=pipe: evaluate(pipe) for pipe in pipes))
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    expect_injected([each for each in errors if "would wait for" not in str(each)])
    for pipe in pipes:
        close(pipe)
    assert_no_threads()


def pipe_in_a_block() -> None:
    """Call a pipe in a block of a model, which locks the RNGs, while another thread runs the inner pipe."""
    options = {"blocks": ["layers.0", "layers.1"]}
    inner = new_pipe(Row(linear(), linear()), (1, 1), **options)
    outer = new_pipe(Row(linear(), Around(inner)), (1, 1), **options)
    expect_injected(together(lambda: evaluate(outer), lambda: evaluate(inner)))
    for pipe in (outer, inner):
        close(pipe)
    assert_no_threads()


class CallsBetween(Row):
    """Calls a pipe before each of its blocks and after the last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(linear(), linear())
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + self.inner[0](x))
            point("between blocks", pause=True)
        return x + self.inner[0](x)


class Pausing(Row):
    """Other threads may continue between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        point("between inner blocks", pause=True)
        return self.layers[1](x)  # type: ignore[no-any-return]


def pipe_between_blocks(schedule: str | None) -> None:
    """Call a pipe between the blocks of a model, while the next stage locks the RNGs for the first time."""
    options = {"blocks": ["layers.0", "layers.1"]}
    model = CallsBetween(Pausing(linear(), linear()))
    outer = copy.deepcopy(model)
    inner = new_pipe(copy.deepcopy(model.inner[0]), (1, 1), **options)
    outer.inner = [inner]
    pipe = new_pipe(outer, (1, 1), **options)
    with certain():
        trained(model, rows(4))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    failed = expect_injected(together(lambda: trained(pipe, rows(4), schedule) and None))
    if not failed:
        expect_gradients(pipe, expected, failed=False)
    for each in (pipe, inner):
        close(each)
    assert_no_threads()


def evaluate(pipe: GPipe) -> None:
    with torch.no_grad():
        pipe(rows(4))


def closed_during_a_step() -> None:
    """Close a pipe while another thread trains it."""
    model, expected = plain(create_2, None, squares, 4)
    pipe = new_pipe(copy.deepcopy(model))
    outcomes = together(lambda: trained(pipe, rows(4), "1f1b") and None, pipe.close)
    failed = expect_injected(outcomes)
    expect_gradients(pipe, expected, failed=failed > 0)
    expect_nothing_left(pipe)
    expect_right(pipe, model=create_2, schedule="1f1b")


class Announces(nn.Module):
    """The identity. It sets ``begun``, and other threads may continue in it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = waiting.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        point("a pause", pause=True)
        return x * 1


def closed_while_computing(pipe: GPipe, announces: Announces) -> None:
    """Close a pipe while one of its layers runs. This waits for the run, and leaves no thread."""
    _, expected = plain(create_2, None, squares, 4)

    def step() -> None:
        try:
            with running(pipe):
                trained(pipe, rows(4), "1f1b")
        finally:
            announces.begun.set()  # an interrupted step may not have called the layer

    def close_later() -> None:
        announces.begun.wait()
        pipe.close()

    failed = expect_injected(together(step, close_later))
    assert_no_threads()
    actual = [parameter.grad for parameter in pipe.parameters()]
    if not failed or any(gradient is not None for gradient in actual):
        torch.testing.assert_close(actual, [*expected.values()], rtol=1e-10, atol=1e-10)
    expect_nothing_left(pipe)


def closed_while_computing_layers() -> None:
    layers = [*copy.deepcopy(plain(create_2, None, squares, 4)[0])]
    layers[3] = announces = Announces()
    closed_while_computing(new_pipe(nn.Sequential(*layers)), announces)


def closed_while_computing_blocks() -> None:
    model = copy.deepcopy(plain(create_row, None, squares, 4)[0])
    model.layers[1][1] = announces = Announces()  # type: ignore[index,operator,union-attr]
    closed_while_computing(new_pipe(model, (1, 1), blocks=["layers.0", "layers.1"]), announces)


def freed_between_forward_and_backward() -> None:
    """Free a pipe before the backward of its output. Its threads end without ``close()``."""
    model, expected = plain(create_2, None, squares, 4)
    own = copy.deepcopy(model)
    pipe = new_pipe(own)
    parameters = dict(pipe.named_parameters())
    x = rows(4)
    try:
        output = pipe(x)
        del pipe
        squares(output).backward()
        del output
        actual = {name: parameter.grad for name, parameter in parameters.items()}
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    except (InjectedError, KeyboardInterrupt) as error:
        error.__traceback__ = None
    gc.collect(0)


def dropped_by_another_thread() -> None:
    """Drop the last reference to a pipe in a thread that has never used it, while another pipe trains."""
    model, expected = plain(create_2, None, squares, 4)
    dropped = [new_pipe(copy.deepcopy(model))]
    with certain():
        trained(dropped[0], rows(4), "1f1b")
    pipe = new_pipe(copy.deepcopy(model))
    outcomes = together(lambda: trained(pipe, rows(4), "1f1b") and None, dropped.clear)
    expect_gradients(pipe, expected, failed=expect_injected(outcomes) > 0)
    expect_right(pipe, model=create_2, schedule="1f1b")


class Draws(nn.Module):
    """A layer that uses torch's RNG."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class DrawsLater(Draws):
    """A layer that uses torch's RNG from the second micro-batch on."""

    is_later = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_later, is_later = True, self.is_later
        return super().forward(x) if is_later else x * 1


noisy = model_of(linear, Draws, linear, Draws)


def nested_draws() -> None:
    """Call a pipe with random layers in the last stage, while the first stage uses the RNG for the first time."""
    inner = new_pipe(noisy(), devices=[torch.device("cpu", 0)] * 2)
    outer = new_pipe(nn.Sequential(linear(), DrawsLater(), Around(inner), linear()))
    torch.manual_seed(7)
    random.seed(7)
    expect_injected(together(lambda: trained(outer, rows(4), None) and None))
    close(inner)
    close(outer)
    assert_no_threads()


def seeds_of_nested_runs() -> None:
    """Seed a nested run from a cell of the outer run, while another stage of the outer run also uses the RNG."""
    outer = RunRNG()
    first, last = CellRNG(outer, 1, 0, torch.device("cpu")), CellRNG(outer, 0, 1, torch.device("cpu"))
    with doing(rng=last):
        inner = RunRNG()
    outcomes = together(lambda: inner.seed, lambda: int(torch.randint(2**30, (), generator=first.draw())))
    assert not [each for each in outcomes if isinstance(each, BaseException)], outcomes


def seeds_of_two_stages() -> None:
    """Use the RNG in two stages for the first time at once. The run takes only one seed."""
    torch.manual_seed(7)
    run = RunRNG()
    first, second = together(lambda: run.seed, lambda: run.seed)
    assert first == second
    assert run.seed == first


def attentions() -> None:
    """Choose different attention kernels in several threads. They take turns, and each uses its own choice."""
    of_process = attention_settings()
    choices = [(not of_process[0], *of_process[1:]), of_process, (not of_process[0], *of_process[1:])]

    def attend(kernels: Any) -> None:
        for _ in range(2):
            with _attention._turns.of(kernels):
                point("inside an attention", pause=True)
                expect(attention_settings() == kernels, "an attention runs with the kernels of another one")

    outcomes = together(*(partial(attend, kernels) for kernels in choices))
    expect_injected(outcomes)
    assert attention_settings() == of_process


class Fails(nn.Module):
    """The identity, which fails in the forward of one micro-batch.

    Args:
        microbatch: the index of the micro-batch.
        before: called before the failure.
        kind: the class of the error.
    """

    def __init__(
        self, microbatch: int, before: Callable[[], object] = lambda: None, kind: type[ValueError] = ValueError
    ) -> None:
        super().__init__()
        self.microbatch, self.calls, self.before, self.kind = microbatch, -1, before, kind

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        point("before a failure")
        if self.calls == self.microbatch:
            self.before()
            raise self.kind(f"micro-batch {self.microbatch}")
        return x * 1


class Meeting:
    """Makes each of two threads wait until the other one has arrived, or a timeout has passed."""

    def __init__(self) -> None:
        self._arrived = [waiting.Semaphore(0), waiting.Semaphore(0)]

    def arrive(self, k: int) -> None:
        self._arrived[1 - k].release()
        self._arrived[k].acquire(timeout=1)


def two_failures(stages: int, second: int, *, meet: bool = True) -> None:
    """Make two layers fail. The error that is first in the schedule is raised, even if it occurs later.

    Args:
        stages: the number of stages.
        second: the stage of the layer whose failure is first in the schedule; it is not stage 0.
        meet: whether both layers run at the same time, so that both failures are known.
    """
    meeting = Meeting()
    layers = [nn.Sequential(linear(), linear()) for _ in range(stages)]
    for k, (stage, microbatch) in enumerate([(0, stages), (second, 0)]):
        layers[stage][1] = Fails(microbatch, partial(meeting.arrive, k) if meet else lambda: None)
    pipe = new_pipe(nn.Sequential(*layers), (1,) * stages, chunks=stages + 1)
    (outcome,) = together(lambda: trained(pipe, rows(stages + 1), "fill_drain") and None)
    if not isinstance(outcome, (InjectedError, KeyboardInterrupt)):
        assert str(outcome) == "micro-batch 0", outcome
    expect_nothing_left(pipe)
    close(pipe)
    assert_no_threads()


class Signals(nn.Module):
    """The identity, which interrupts the main thread in its first forward."""

    is_on = True

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on and active and active[-1].controls_this_thread():
            self.is_on = False
            self.before()
            active[-1].interrupt_main()
            point("after a signal")
        return x * 1


def pieces_of_two_threads() -> None:
    """Run pieces of forwards that use Python's RNG in two threads. They get the same numbers as in sequence."""

    def numbers(run: Callable[..., list[Any]]) -> tuple[list[Any], Any]:
        random.seed(7)
        own = Numbers(Drawing(), set())

        def piece(k: int) -> float:
            end = own.begin(k, None, [k], is_block=True)
            try:
                point("inside a piece", pause=True)
                return random.random()
            finally:
                end()

        return run(*(partial(piece, k) for k in range(2))), generator_states()

    with certain():
        expected, after = numbers(lambda *pieces: [piece() for piece in pieces])
    found, now = numbers(together)
    if not expect_injected(found):
        assert found == expected, "a piece has used the random numbers of another one"
        assert str(now) == str(after)


class DrawsHere(nn.Module):
    """A layer that uses Python's RNG."""

    def forward(self, x: Tensor) -> Tensor:
        point("before a number", pause=True)
        return x * random.random()


def pieces_of_nested_run() -> None:
    """Call a pipe in a block of a model. Its blocks draw from the state of that block, in any order of threads."""
    options = {"blocks": ["layers.0", "layers.1"]}
    inner = new_pipe(Row(DrawsHere(), DrawsHere()), (1, 1), **options)
    outer = new_pipe(Row(Around(inner), DrawsHere()), (1, 1), **options)

    def run() -> tuple[Tensor, Any]:
        random.seed(7)
        return outer.evaluate(rows(4), loss_fn=squares, reduction="mean"), random.getstate()

    with certain():
        expected, after = run()
    (found,) = together(run)
    if not expect_injected([found]):
        assert torch.equal(found[0], expected), "a block has used the random numbers of another one"
        assert found[1] == after
    for pipe in (outer, inner):
        close(pipe)
    assert_no_threads()


def interrupted(
    stage: int, schedule: str | None, before: Callable[[], object] = lambda: None, *, is_model: bool = False
) -> None:
    """Interrupt the caller by a signal while it waits for the stages."""
    create = create_row if is_model else create_2
    model, expected = plain(create, None, squares, 4)
    own, signals = copy.deepcopy(model), Signals(before)
    if is_model:
        own.layers[stage][1] = signals  # type: ignore[index,union-attr,operator]
        pipe = new_pipe(own, (1, 1), blocks=["layers.0", "layers.1"], chunks=4)
    else:
        own[2 * stage + 1] = signals  # type: ignore[operator]
        pipe = new_pipe(own)
    with running(pipe):
        (outcome,) = together(lambda: trained(pipe, rows(4), schedule) and None)
    assert isinstance(outcome, (InjectedError, KeyboardInterrupt)), outcome
    signals.is_on = False  # a failed step may not have reached the layer
    expect_nothing_left(pipe)
    expect_gradients(pipe, expected, failed=True)
    expect_right(pipe, model=create, schedule=schedule)


def interrupted_twice(stage: int, schedule: str | None, *, is_model: bool = False) -> None:
    """Do the same as :func:`interrupted`, with an injected interrupt or failure after the signal."""
    with certain_until() as begin:
        interrupted(stage, schedule, begin, is_model=is_model)


def unreadable_failure() -> None:
    """Raise an error in a layer that no note can explain, so that its worker fails outside a step."""
    with certain_until() as begin:
        one_failure(1, 0, begin, UnreadableError)


class UnreadableError(ValueError):
    """An error whose message raises a different error."""

    def __str__(self) -> str:
        raise ValueError(*self.args)


def one_failure(
    stage: int, microbatch: int, before: Callable[[], object] = lambda: None, kind: type[ValueError] = ValueError
) -> None:
    """Make a layer of a small pipe fail, while other stages wait for its outputs or gradients."""
    model, expected = plain(create_2, None, squares, 4)
    layers = [*copy.deepcopy(model)]
    layers[2 * stage + 1] = fails = Fails(microbatch, before, kind)
    pipe = new_pipe(nn.Sequential(*layers))
    (outcome,) = together(lambda: trained(pipe, rows(4), "1f1b") and None)
    if not isinstance(outcome, (InjectedError, KeyboardInterrupt)):
        assert str(outcome) == f"micro-batch {microbatch}", outcome
    fails.microbatch = -1  # an interrupted step may not have reached it
    fails.calls = 0
    expect_nothing_left(pipe)
    expect_gradients(pipe, expected, failed=True)
    expect_right(pipe, model=create_2, schedule="1f1b")


class Persistent(Row):
    """A model that calls a block again if it is interrupted there, like a model that catches all exceptions."""

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            try:
                y = layer(x)
            except (ValueError, InjectedError):
                raise
            except BaseException:
                y = layer(x)
            x = y
        return x


def failure_in_a_block(block: int, schedule: str | None, kind: type[Row] = Row, **options: Any) -> None:
    """Make a block of a model fail, while the forwards of other micro-batches wait for their turns."""
    model, expected = plain(create_row, None, squares, 4)
    blocks = [*copy.deepcopy(model).layers]  # type: ignore[arg-type]
    blocks[block][1] = fails = Fails(0)
    options = {"balance": (1, 1), "blocks": ["layers.0", "layers.1"], **options}
    pipe = new_pipe(kind(*blocks), **options)
    if len(pipe.balance) == 1:
        blocks[1 - block][1].stage = None  # type: ignore[assignment]
    with running(pipe):
        (outcome,) = together(lambda: trained(pipe, rows(4), schedule) and None)
    if not isinstance(outcome, (InjectedError, KeyboardInterrupt)):
        assert str(outcome) == "micro-batch 0", outcome
    fails.microbatch = -1  # an interrupted step may not have reached it
    expect_nothing_left(pipe)
    expect_gradients(pipe, expected, failed=True)
    expect_right(pipe, model=create_row, schedule=schedule)


class Counts(nn.Module):
    """The identity, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = waiting.Semaphore(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.release()
        return x * 1


def failure_with_waiting_forwards(count: int) -> None:
    """Make a block fail in the first micro-batch, once the forwards of all others wait for their turns."""
    model, _ = plain(create_row, None, squares, 4)
    blocks: Any = [*copy.deepcopy(model).layers]  # type: ignore[arg-type]
    counts = Counts()

    def wait() -> None:
        for _ in range(count):
            counts.calls.acquire(timeout=1)
        begin()

    blocks[0][1], blocks[1][1] = counts, Fails(0, wait)
    pipe = new_pipe(Row(*blocks), (1, 1), blocks=["layers.0", "layers.1"], chunks=count)
    with certain_until() as begin:
        (outcome,) = together(lambda: trained(pipe, rows(count)) and None)
    assert str(outcome) == "micro-batch 0" or expect_injected([outcome])
    blocks[1][1].microbatch = -1
    expect_nothing_left(pipe)
    expect_right(pipe, model=create_row, schedule=None)


def create_row() -> nn.Module:
    return Row(*(nn.Sequential(*create_2()[2 * k : 2 * k + 2]) for k in range(2)))


SEVERAL: dict[str, Callable[[], None]] = {
    "two-callers": lambda: two_callers("1f1b", "1f1b"),
    "two-callers-call": lambda: two_callers(None, None),
    "two-callers-mixed": lambda: two_callers("1f1b", None),
    "two-pipes": lambda: two_pipes("1f1b"),
    "two-pipes-call": lambda: two_pipes(None),
    "shared-parameters": shared_parameters,
    "nested": nested,
    "nested-and-inner": nested_and_inner,
    "nested-draws": nested_draws,
    "nested-seeds": seeds_of_nested_runs,
    "two-seeds": seeds_of_two_stages,
    "attentions": attentions,
    "two-pieces": pieces_of_two_threads,
    "nested-pieces": pieces_of_nested_run,
    "two-failures": lambda: two_failures(2, 1),
    "two-failures-3-stages": lambda: two_failures(3, 2, meet=False),
    "two-failures-middle": lambda: two_failures(3, 1),
    "signal-in-first-stage": lambda: interrupted(0, "1f1b"),
    "signal-in-last-stage": lambda: interrupted(1, "1f1b"),
    "two-signals-in-first-stage": lambda: interrupted_twice(0, "1f1b"),
    "two-signals-in-last-stage": lambda: interrupted_twice(1, "1f1b"),
    "two-signals-call": lambda: interrupted_twice(1, None),
    "two-signals-model": lambda: interrupted_twice(1, "1f1b", is_model=True),
    "two-signals-call-model": lambda: interrupted_twice(1, None, is_model=True),
    "failure-in-first-stage": lambda: one_failure(0, 1),
    "failure-in-last-stage": lambda: one_failure(1, 0),
    "unreadable-failure": unreadable_failure,
    "failure-in-first-block": lambda: failure_in_a_block(0, "1f1b"),
    "failure-in-last-block": lambda: failure_in_a_block(1, None),
    "failure-in-one-stage": lambda: failure_in_a_block(0, None, balance=(2,), chunks=1),
    "failure-with-waiting-forwards": lambda: failure_with_waiting_forwards(3),
    "failure-is-caught": lambda: failure_in_a_block(1, "1f1b", Persistent),
    "each-other": each_other,
    "pipe-in-a-block": pipe_in_a_block,
    "pipe-between-blocks": lambda: pipe_between_blocks("fill_drain"),
    "pipe-between-blocks-call": lambda: pipe_between_blocks(None),
    "closed-during-a-step": closed_during_a_step,
    "closed-while-computing": closed_while_computing_layers,
    "closed-while-computing-model": closed_while_computing_blocks,
    "freed-between": freed_between_forward_and_backward,
    "dropped-by-another-thread": dropped_by_another_thread,
}
