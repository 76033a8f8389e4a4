"""Random generators of Python and NumPy: each call of a block has its own, independent of concurrent stages."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import MODES, Layer, rows
from .residuals import Residuals, of_function, residuals, two_stages

numpy = pytest.importorskip("numpy")
MANY = 300


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def of_python() -> float:
    return sum(random.random() for _ in range(MANY)) / MANY


def of_numpy() -> float:
    return float(sum(numpy.random.rand() for _ in range(MANY))) / MANY


def drawn(draw: Callable[[], float]) -> Residuals:
    return of_function(lambda block, x: block.m[0](x) * draw())


def seeded(draw: Callable[[], float]) -> Residuals:
    """Return a model whose blocks each set a seed first, like the random attention of BigBird."""

    def function(block: Any, x: Tensor) -> Tensor:
        random.seed(block.k)
        numpy.random.seed(block.k)
        return block.m[0](x) * draw()

    return of_function(function)


def trained(pipe: GPipe, x: Tensor, **options: Any) -> list[Tensor]:
    """The loss and the gradients of a step that begins with certain seeds."""
    random.seed(0)
    numpy.random.seed(0)
    pipe.zero_grad()
    loss_fn = lambda output: output.square().mean()  # noqa: E731
    loss = pipe.step(x, loss_fn=loss_fn, **options)
    return [loss, *[parameter.grad for parameter in pipe.parameters()]]


DRAWS = [of_python, of_numpy]


@pytest.mark.parametrize("draw", DRAWS)
@given(
    balance=st.sampled_from([[4], [1, 3], [2, 2], [1, 1, 2]]),
    mode=st.sampled_from(MODES),
    options=st.sampled_from(
        [{}, {"reduction": "mean", "schedule": "1f1b"}, {"reduction": "mean", "schedule": "zero_bubble"}]
    ),
)
def test_numbers_depend_only_on_call_and_micro_batch(
    draw: Callable[[], float], balance: list[int], mode: str, options: dict[str, Any]
) -> None:
    x = rows(6)
    with closing(GPipe(drawn(draw), [4], devices=["cpu"], chunks=3, checkpoint="never")) as one:
        expected = trained(one, x)
    devices = ["cpu"] * len(balance)
    with closing(GPipe(drawn(draw), balance, devices=devices, chunks=3, checkpoint=mode)) as pipe:
        for _ in range(2):
            torch.testing.assert_close(trained(pipe, x, **options), expected)


@pytest.mark.parametrize("draw", DRAWS)
@given(mode=st.sampled_from(MODES), options=st.sampled_from([{}, {"reduction": "mean", "schedule": "1f1b"}]))
def test_blocks_seeding_generators_match_loop(draw: Callable[[], float], mode: str, options: dict[str, Any]) -> None:
    x, plain = rows(6), seeded(draw)
    losses = [plain(part).square().mean() / 3 for part in x.chunk(3)]
    sum(losses).backward()  # type: ignore[union-attr]
    expected = [sum(losses).detach(), *[parameter.grad for parameter in plain.parameters()]]  # type: ignore[union-attr]
    with closing(GPipe(seeded(draw), devices=["cpu"] * 3, chunks=3, checkpoint=mode)) as pipe:
        for _ in range(2):
            torch.testing.assert_close(trained(pipe, x, **options), expected)


def states() -> tuple[Any, str]:
    return random.getstate(), repr(numpy.random.get_state(legacy=False))


def test_generators_of_caller_advance_if_used() -> None:
    x = rows(6)
    with torch.no_grad(), closing(two_stages(residuals())) as still, closing(two_stages(drawn(of_python))) as pipe:
        before = states()
        still(x)
        assert states() == before
        first = pipe(x)
        assert states()[0] != before[0]
        assert states()[1] == before[1]
        assert not torch.equal(pipe(x), first)
        random.setstate(before[0])
        torch.testing.assert_close(pipe(x), first)


def test_a_block_may_draw_for_some_sizes_only() -> None:
    model = of_function(lambda block, x: block.m[0](x) * (of_python() if len(x) > 1 else 1))
    found = []
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3, checkpoint="always")) as pipe:
        trained(pipe, rows(3))
        found += [trained(pipe, rows(6)) for _ in range(3)]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_what_stands_between_blocks_has_its_own_too() -> None:
    x, found = rows(6), []
    for balance in ([4], [1, 3], [2, 2]):
        model = drawn(of_python)
        model.between = lambda k, x: x * of_python()
        with closing(GPipe(model, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint="always")) as pipe:
            found += [trained(pipe, x, reduction="mean", schedule="1f1b") for _ in range(2)]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_error_in_random_block_restores_generators() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        random.seed(1)
        if block.k == 2 and fails:
            raise ValueError("a block fails")
        return block.m[0](x)

    fails = True
    x = rows(6)
    with closing(two_stages(of_function(function))) as pipe:
        random.seed(0)
        with pytest.raises(ValueError, match="a block fails"):
            pipe(x)
        own = {*range(9)} and random.getstate()
        random.seed(1)
        assert own != random.getstate()
        fails = False
        assert pipe(x).shape == x.shape


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("quiet", [0, 1, 4, 9])
def test_block_that_draws_later_is_reproducible_later(
    draw: Callable[[], float], quiet: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It draws nothing in its first calls, in the first step or in the first few ones. One step may be irregular."""

    def run(balance: list[int], quiet: int) -> tuple[list[Any], int]:
        calls: dict[int, int] = {}

        def function(block: Any, x: Tensor) -> Tensor:
            calls[block.k] = calls.get(block.k, 0) + 1
            return block.m[0](x) * (draw() if calls[block.k] > quiet else 1)

        caplog.clear()
        devices = ["cpu"] * len(balance)
        with closing(GPipe(of_function(function), balance, devices=devices, chunks=3, checkpoint="never")) as pipe:
            found = [trained(pipe, rows(6), reduction="mean", schedule="1f1b") for _ in range(6)]
        return found[4:], sum("did not before" in record.getMessage() for record in caplog.records)

    expected, warnings = run([4], 0)
    assert not warnings
    for balance in ([4], [2, 2], [1, 1, 2]):
        found, warnings = run(balance, quiet)
        torch.testing.assert_close(found, expected)
        assert (quiet > 3) <= warnings <= 3 * (quiet > 0)


def test_block_may_draw_for_a_flag_only() -> None:
    class Flagged(Residuals):
        def forward(self, x: Tensor, noisy: bool = False) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, noisy)
            return x

    function = lambda block, x, noisy: block.m[0](x) * (of_python() if noisy else 1)  # noqa: E731
    found = []
    for balance, quiet in (([4], False), ([2, 2], True), ([1, 1, 2], True)):
        model = Flagged(*(Layer(function, nn.Linear(3, 3).double(), k=k) for k in range(4)))
        with torch.no_grad(), closing(GPipe(model, balance, devices=["cpu"] * len(balance), chunks=3)) as pipe:
            if quiet:
                pipe(rows(6))
            random.seed(0)
            torch.manual_seed(0)
            found.append((pipe(rows(6), noisy=True), random.random()))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_drawing_thread_is_told_of_thrice_at_most(caplog: pytest.LogCaptureFixture) -> None:
    """It must not draw, but may. Then no step waits for its stages, one at a time, forever."""
    stops = threading.Event()

    def draws() -> None:
        while not stops.is_set():
            random.random()
            stops.wait(1e-4)

    thread = threading.Thread(target=draws)
    thread.start()
    try:
        with closing(two_stages(residuals())) as pipe:
            for _ in range(30):
                trained(pipe, rows(6), reduction="mean")
    finally:
        stops.set()
        thread.join()
    assert sum("did not before" in record.getMessage() for record in caplog.records) <= 3


@pytest.mark.parametrize("draw", DRAWS)
def test_nested_numbers_do_not_depend_on_balance(draw: Callable[[], float]) -> None:
    found = []
    for balance in ([4], [2, 2], [1, 1, 2]):
        inner = GPipe(drawn(draw), balance, devices=["cpu"] * len(balance), chunks=2, checkpoint="never")
        model = Residuals(*(nn.Linear(3, 3) for _ in range(2)))
        model.layers = nn.ModuleList(
            Layer(lambda block, x, inner=inner: block.m[0](x) + inner(x), nn.Linear(3, 3).double()) for _ in range(2)
        )
        for k, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.1 * k)
        with closing(inner), closing(two_stages(model, blocks="layers", checkpoint="never")) as pipe:
            found.append([trained(pipe, rows(6), reduction="mean")[0] for _ in range(2)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_nested_pipe_may_use_generators() -> None:
    inner = [two_stages(drawn(of_python)) for _ in range(2)]
    model = Residuals(*(nn.Linear(3, 3) for _ in range(2)))
    model.layers = nn.ModuleList(
        Layer(lambda block, x, pipe=pipe: block.m[0](x) + pipe(x), nn.Linear(3, 3)) for pipe in inner
    )
    with torch.no_grad(), closing(two_stages(model.double(), blocks="layers")) as pipe:
        assert pipe(rows(6)).shape == (6, 3)
    for each in inner:
        each.close()
