"""A pipe of a model whose own forward runs leaves what forward and backward of the plain model leave."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, LossSum
from microbatch import Split, flatten, map_tensors

from ..layers import ALL_ROWS, DOUBLE, MODES, assert_same, assert_trains_like, each_mode, rows, running, trained
from ..schedules import balance_by, suited
from .forwards import LISTS, Told, models
from .residuals import plain_of, residuals, two_stages

SCHEDULES = ("1f1b", "fill_drain", "zero_bubble", "interleaved")


@dataclass(frozen=True)
class Way:
    """A way to compute loss and gradients; all of them are equivalent.

    Attributes:
        how: a schedule of a step, or "call", "call with out_spec".
        loss: what kind.
        stages: the maximal number of stages.
        cut: the index of the balance.
        rows: the rows of each mini-batch.
    """

    how: str
    loss: str
    stages: int
    cut: int
    rows: tuple[int, ...]
    chunks: int
    mode: str
    inline: bool
    input_needs_grad: bool = False

    def pipe(self, model: nn.Module) -> GPipe:
        count = len(GPipe(copy.deepcopy(model), devices=["cpu"]).block_names)
        balance = balance_by(self.cut, count, self.stages)
        workers = max(1, len(balance) // 2) if self.how == "interleaved" and len(balance) % 2 == 0 else len(balance)
        devices = [f"cpu:{j % workers}" for j in range(len(balance))]
        spec = Split(0) if self.how == "call with out_spec" else None
        return GPipe(model, balance, devices=devices, chunks=self.chunks, checkpoint=self.mode, out_spec=spec)

    def where(self) -> AbstractContextManager[None]:
        return running(self.inline)


ways = st.builds(
    Way,
    st.sampled_from(["call", "call with out_spec", *SCHEDULES]),
    st.sampled_from(["mean", "sum", "counted", "whole", "own", "own by items"]),
    st.integers(1, 4),
    st.integers(0, 9),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.integers(1, 4),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
).filter(lambda way: not (way.how.startswith("call") and "own" in way.loss))


def rows_losses(output: Any) -> Tensor:
    """One for each row."""
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((k + 1) * tensor.square().sum(1) for k, tensor in enumerate(tensors)) * 0.1


def counted(output: Any, target: Any) -> LossSum:
    return LossSum(rows_losses(output).sum(), len(rows_losses(output)))


def contrasted(output: Any, target: Any) -> Tensor:
    """Weight each row by comparing it with the others."""
    each = rows_losses(output)
    return each.softmax(0) @ each


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mean": (lambda output, _: rows_losses(output).mean(), {"reduction": "mean"}),
    "sum": (lambda output, _: rows_losses(output).sum(), {"reduction": "sum", "normalizer": 7}),
    "counted": (counted, {}),
    "whole": (contrasted, {}),
}


def batches(way: Way) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for count in way.rows:
        x = torch.randn(count, 2, dtype=DOUBLE, generator=generator).requires_grad_(way.input_needs_grad)
        own = {"labels": torch.randn(count, 3, dtype=DOUBLE, generator=generator)} if "own" in way.loss else {}
        items = {"num_items_in_batch": torch.tensor(2.0 * count)} if way.loss == "own by items" else {}
        made.append({"x": x, **own, **items})
    return made


def plainly(model: nn.Module, batch: dict[str, Any], way: Way) -> tuple[Tensor, Any]:
    """Return loss and output of the plain model on the full batch, and add its gradients."""
    x = batch["x"] * 1
    output = model(**{**batch, "x": x})
    if "own" in way.loss:
        loss = output.loss
    else:
        function, options = LOSSES[way.loss]
        loss = function(output, None)
        loss = loss.total / loss.count if isinstance(loss, LossSum) else loss / options.get("normalizer", 1)
    if loss.requires_grad:
        loss.backward()
    return loss, output


def stepped(pipe: GPipe, batch: dict[str, Any], way: Way) -> tuple[Tensor, Any]:
    batch = {**batch, "x": batch["x"] * 1}
    with way.where():
        if way.how.startswith("call"):
            output = pipe(**batch)
            function, options = LOSSES[way.loss]
            loss = function(output, None)
            loss = loss.total / loss.count if isinstance(loss, LossSum) else loss / options.get("normalizer", 1)
            loss.backward()
            return loss, output
        function, options = LOSSES.get(way.loss, (None, {}))
        if way.loss == "own by items":  # each micro-batch has its own loss, and they are not joined
            return pipe.step(schedule=suited(way.how, pipe), reduction="sum", **batch), None
        schedule = suited(way.how, pipe)
        if way.loss in ("whole", "own") and schedule != "fill_drain":
            schedule = None
        return pipe.step(loss_fn=function, schedule=schedule, return_outputs=True, **options, **batch)


def assert_close(found: Any, expected: Any) -> None:
    (a, tree), (b, other) = flatten(found), flatten(expected)
    assert str(tree) == str(other)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10) if isinstance(y, Tensor) else None
        assert isinstance(y, Tensor) or x == y


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients, with zeros for parameters without a gradient."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def train_by(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.05 * parameter.grad
            parameter.grad = None


def expected_of(plain: nn.Module, batch: dict[str, Any], way: Way) -> tuple[Any, ...] | None:
    """Return the plain model's results; None if it fails."""
    try:
        loss, output = plainly(plain, batch, way)
    except RuntimeError as error:
        if "inplace" in str(error) or "in-place" in str(error):
            return None
        raise
    return (loss, output) if loss.requires_grad and loss.isfinite() else None


def is_out_of_order(told: Told) -> bool:
    """Return whether blocks are called in a different order than registered."""
    called = [name for name, _, _ in told.statements if name in (*LISTS, "again")]
    return "again" in called or called != sorted(called, key=LISTS.index)


@contextmanager
def allowing_out_of_order(told: Told) -> Iterator[None]:
    """Allow the error that a later stage runs a block of an earlier one, which counts in a buffer."""
    try:
        yield
    except RuntimeError as refusal:
        assert "blocks in the order of their calls" in str(refusal), refusal  # noqa: PT017
        assert "counting" in told.kinds
        assert is_out_of_order(told)


def expect_trained(told: Told, way: Way) -> None:
    """Train for several steps, and compare with the plain model."""
    model = told.model()
    plain = copy.deepcopy(model)
    with closing(way.pipe(model)) as pipe:
        for batch in batches(way):
            leaf = batch["x"]
            expected = expected_of(plain, batch, way)
            assume(expected is not None)
            grad, leaf.grad = leaf.grad, None
            loss, output = stepped(pipe, batch, way)
            assert_close(loss.detach(), expected[0].detach())
            assert_close(detached(output), None if output is None else detached(expected[1]))
            assert_close(gradients(pipe), gradients(plain))
            if grad is not None:
                assert_close(leaf.grad, grad)
            train_by(plain)
            train_by(model)


@given(models(in_place=False), ways)
def test_a_pipe_trains_as_its_model(told: Told, way: Way) -> None:
    with allowing_out_of_order(told):
        expect_trained(told, way)


@given(models(), ways)
def test_in_place_changes_are_right_or_raise(told: Told, way: Way) -> None:
    try:
        expect_trained(told, way)
    except RuntimeError as refusal:
        assert "inplace" in str(refusal) or "in place" in str(refusal), refusal  # noqa: PT017


def detached(value: Any) -> Any:
    return map_tensors(Tensor.detach, value)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_pipe_trains_by_itself(copied: Callable[[GPipe], GPipe]) -> None:
    with closing(two_stages(residuals())) as pipe:
        pipe(rows(6))
        other = copied(pipe)
        with closing(other):
            assert (other.block_names, other.balance, other.devices) == (pipe.block_names, pipe.balance, pipe.devices)
            assert_trains_like(other, plain_of(pipe), rows(6))
            assert all(parameter.grad is None for parameter in pipe.parameters())


def test_state_has_names_and_order_of_model() -> None:
    with closing(two_stages(residuals())) as pipe:
        model = pipe[:]
        assert [*pipe.state_dict()] == [*model.state_dict()]
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        state = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
        pipe.load_state_dict(state)
        assert not any(parameter.any() for parameter in model.parameters())
        pipe(rows(6))
        assert [*pipe.state_dict()] == [*state]


def test_mode_of_pipe_follows_model() -> None:
    model, seen = residuals(), []
    model.between = lambda k, x: seen.append((model.training, model.layers[k].training))
    with closing(two_stages(model)) as pipe:
        for mode in (False, True):
            assert pipe.train(mode) is pipe
            assert pipe.training is model.training is model.layers[0].training is mode
            seen.clear()
            pipe(rows(6))
            assert {*seen} == {(mode, mode)}


def test_indexing_returns_blocks_or_whole_model() -> None:
    model = residuals()
    with closing(two_stages(model)) as pipe:
        assert [*pipe] == [*model.layers]
        assert len(pipe) == 4
        assert pipe[1] is model.layers[1]
        assert pipe[:] is model
        with pytest.raises(TypeError, match="has no parts that are models"):
            pipe[1:]


def test_a_block_that_was_replaced_is_refused() -> None:
    with closing(two_stages(residuals())) as pipe:
        pipe[:].layers[1] = nn.Linear(3, 3, dtype=DOUBLE)
        with pytest.raises(RuntimeError, match=r"block 'layers\.1' of Residuals was replaced or removed"):
            pipe(rows(6))


@pytest.mark.parametrize("on", ["model", "pipe"])
@pytest.mark.parametrize("schedule", ["1f1b", ALL_ROWS])
def test_a_module_outside_of_blocks_may_be_replaced(on: str, schedule: str) -> None:
    with closing(two_stages(residuals())) as pipe:
        trained(pipe, rows(6), schedule)
        (pipe if on == "pipe" else pipe[:]).head = nn.Linear(3, 2, dtype=DOUBLE)
        pipe.zero_grad()
        plain = plain_of(pipe)
        loss, output = trained(pipe, rows(6), schedule)
        assert output.shape == (6, 2)
        torch.testing.assert_close(loss, trained(plain, rows(6))[0])
        assert_same(pipe, plain)


def test_a_pipe_is_no_model() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
    with pytest.raises(TypeError, match="is a pipe already"):
        GPipe(pipe, devices=["cpu"])


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_script_module_is_refused() -> None:
    with pytest.raises(TypeError, match="ScriptModule"):
        GPipe(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), devices=["cpu"])


@given(st.integers(1, 9), st.integers(1, 9))
def test_rows_that_chunks_do_not_divide(count: int, chunks: int) -> None:
    with closing(two_stages(residuals(), chunks=chunks)) as pipe:
        assert_trains_like(pipe, plain_of(pipe), rows(count))


def test_a_mini_batch_without_rows() -> None:
    with closing(two_stages(residuals())) as pipe:
        assert pipe(rows(6)[:0]).shape == (0, 3)


class AlongTheU(nn.Module):
    """A U-Net: what goes down is used where it comes up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(3, 3) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        for layer in self.up:
            x = layer(x * skips.pop()).relu_()
        return x


@pytest.mark.parametrize("schedule", [None, ALL_ROWS, *SCHEDULES])
@each_mode
def test_a_u_net_trains_as_it_does_alone(schedule: str | None, mode: str) -> None:
    devices = [f"cpu:{j % 2}" for j in range(4)]
    with closing(GPipe(AlongTheU().to(DOUBLE), devices=devices, chunks=3, checkpoint=mode)) as pipe:
        plain = plain_of(pipe)
        for _ in range(2):
            torch.testing.assert_close(trained(pipe, rows(7), schedule), trained(plain, rows(7)))
            assert_same(pipe, plain)
