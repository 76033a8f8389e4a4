"""Losses of micro-batches are summed if the model divides its own sum by ``num_items_in_batch``."""

import copy
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, LossSum
from microbatch import Replicate, Split

from .losses import CLASSES, IGNORED, Loss, assert_same, both, labelled


class Model(nn.Module):
    """Logits for each token, and a loss of them."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, CLASSES)
        self.loss = loss
        self.to(dtype)

    def forward(self, tokens: Tensor, labels: Any = None, ends: Any = None, num_items_in_batch: Any = None) -> Any:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = (self.head(hidden) / 2).tanh() * 2
        return {"loss": self.loss(logits, labels, ends, num_items_in_batch), "logits": logits}


def tokens(logits: Tensor, labels: Tensor, *_: Any, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


# By the convention.


def by_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    return tokens(logits, labels) if items is None else tokens(logits, labels, reduction="sum") / items


def by_hand_with_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    losses = tokens(logits, labels, reduction="none")
    return losses.sum() / ((labels != IGNORED).sum() if items is None else items)


def of_next_token(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    return by_items(logits[:, :-1], labels[:, 1:], ends, items)


def of_next_token_and_dropout(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    return of_next_token(F.dropout(logits, 0.0), labels, ends, items)


BY_ITEMS: list[Loss] = [by_items, by_hand_with_items, of_next_token, of_next_token_and_dropout]

# Others.


def weighted(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return 2 * tokens(logits, labels, weight=torch.arange(1, 1 + CLASSES).to(logits), label_smoothing=0.1)


def of_rows(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return (logits.square().mean((1, 2)) * (labels != IGNORED).sum(1)).mean()


def two_ends(logits: Tensor, labels: Tensor, ends: Tensor, *_: Any) -> Tensor:
    return tokens(logits, labels) + F.cross_entropy(logits.mean(1), ends)


def contrast(logits: Tensor, *_: Any) -> Tensor:
    flat = logits.mean(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)))


def balanced(coefficient: float) -> Loss:
    """Return a loss with a penalty for similar logits, however small."""

    def loss(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
        return by_items(logits, labels, ends, items) + coefficient * logits.softmax(-1).mean((0, 1)).square().sum()

    return loss


def other_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    """Divided by the number of all labels if no number is given."""
    return tokens(logits, labels, reduction="sum") / (labels.numel() if items is None else items)


def marked(value: int) -> Loss:
    """A number that may occur among the labels does not count either."""

    def loss(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
        return by_items(logits, labels.where(labels != value, IGNORED), ends, items)

    return loss


def rare(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    """One class weighs more in a mean."""
    weight = torch.ones(CLASSES).to(logits)
    weight[CLASSES - 1] = 3
    if items is None:
        return tokens(logits, labels, weight=weight)
    return tokens(logits, labels, reduction="sum", weight=weight) / items


def only_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    return of_rows(logits, labels) if items is None else tokens(logits, labels, reduction="sum") / items


OTHERS = [tokens, weighted, of_rows, two_ends, contrast, balanced(1.0), balanced(1e-3), balanced(1e-9), other_items]
OTHERS += [marked(0), marked(CLASSES - 1), rare, only_items]


class Penalized(Model):
    """The loss has a penalty on all parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        penalty = sum(p.square().sum() for p in self.layers.parameters())
        return {**output, "loss": output["loss"] + penalty}


class TimeFirst(Model):
    """Rows are the second dimension inside."""

    def forward(self, tokens: Tensor, labels: Any = None, ends: Any = None, num_items_in_batch: Any = None) -> Any:
        hidden = self.embed(tokens.t())
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": self.loss(self.head(hidden).transpose(0, 1), labels, ends, num_items_in_batch)}


class Without(Model):
    """Takes no number of items."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(tokens, labels)


def batch(count: int, length: int = 3, kept: int = 3) -> dict[str, Tensor]:
    return labelled(count, length, kept, sure=2)


def new(loss: Loss, kind: type[Model] = Model, chunks: int = 2) -> tuple[GPipe, Model]:
    plain = both(loss, kind)[1]
    return GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=chunks), copy.deepcopy(plain)


def schedule_of_second_step(pipe: GPipe, plain: nn.Module, **changes: Any) -> str:
    for _ in range(2):
        assert_same(pipe, plain, {**batch(4, 5), **changes})
    assert pipe.last_schedule is not None
    return pipe.last_schedule.name


@pytest.mark.parametrize("loss", BY_ITEMS + OTHERS)
@given(
    count=st.integers(1, 7),
    length=st.integers(2, 20),
    kept=st.integers(0, 9),
    chunks=st.integers(1, 8),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    schedule=st.sampled_from([None, "1f1b", "fill_drain", "zero_bubble", "auto", "search"]),
    items=st.sampled_from([None, 11, 2.5, torch.tensor(11)]),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_it_is_the_loss_of_the_plain_model(
    loss: Loss, count: int, length: int, kept: int, chunks: int, checkpoint: str, schedule: str | None, items: Any
) -> None:
    """If losses of micro-batches may not add up, a schedule that cannot wait for the full batch raises."""
    pipe, plain = both(loss, Model)
    pipe.chunks, pipe.checkpoint = chunks, checkpoint
    inputs: dict[str, Any] = batch(count, length, kept)
    if items is not None:
        inputs["num_items_in_batch"] = items
    if loss not in BY_ITEMS and schedule in ("1f1b", "zero_bubble") and -(-count // -(-count // chunks)) > 1:
        with pytest.raises(ValueError, match=r"not known how the losses of micro-batches add up.*omit schedule="):
            pipe.step(**inputs, schedule=schedule)
        schedule = None
    assert_same(pipe, plain, inputs, schedule)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("loss", BY_ITEMS + OTHERS)
def test_later_steps_use_1f1b_if_losses_add_up(loss: Loss, training: bool) -> None:
    pipe, plain = new(loss)
    with closing(pipe):
        pipe.train(training)
        assert schedule_of_second_step(pipe, plain) == ("1f1b" if loss in BY_ITEMS else "fill_drain")


@pytest.mark.parametrize("kind", [Penalized, TimeFirst])
def test_untestable_model_keeps_full_batch_loss(kind: type[Model]) -> None:
    pipe, plain = new(by_items, kind)
    with closing(pipe):
        assert schedule_of_second_step(pipe, plain) == "fill_drain"


def test_model_without_item_count_is_not_tested() -> None:
    pipe, plain = new(by_items, Without)
    inputs = {name: value for name, value in batch(4, 5).items() if name != "ends"}
    with closing(pipe):
        for _ in range(2):
            assert_same(pipe, plain, inputs)
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == "fill_drain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_precision_of_the_model_does_not_matter(dtype: torch.dtype) -> None:
    with closing(GPipe(Model(by_items, dtype), devices=["cpu"] * 2, chunks=2)) as pipe:
        losses = [pipe.step(**batch(4, 5)) for _ in range(2)]
        torch.testing.assert_close(losses[1], losses[0])
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == "1f1b"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_first_step_may_request_a_schedule(schedule: str) -> None:
    pipe, plain = new(by_items)
    with closing(pipe):
        expected = plain(**batch(4))["loss"]
        torch.testing.assert_close(pipe.step(**batch(4), schedule=schedule), expected.detach())
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == schedule


class Counting(nn.Module):
    """Counts its calls, in a buffer and an attribute, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = self.hooked = 0

    def hook(self, *_: Any) -> None:
        self.hooked += 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return x + 0 * (torch.rand(()) + random.random())


def states() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    return [torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state(legacy=False))]


def counted(loss: Loss, place: str) -> Model:
    model = Model(loss)
    if place == "head":
        model.head = nn.Sequential(Counting(), model.head)
    else:
        model.layers[0] = nn.Sequential(Counting(), model.layers[0])
    return model


def counters(model: nn.Module) -> Counting:
    return next(each for each in model.modules() if isinstance(each, Counting))


@pytest.mark.parametrize("place", ["layers", "head"])
def test_early_trial_restores_buffers_and_generators(place: str) -> None:
    model = counted(contrast, place)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, blocks="layers")) as pipe:
        before = states()
        with pytest.raises(ValueError, match="Model computes a loss, but it is not known"):
            pipe.step(**batch(4), schedule="1f1b")
        assert states() == before
        assert counters(model).calls == 0


@pytest.mark.parametrize("loss", [by_items, contrast])
def test_trial_after_first_step_has_no_effect(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_tried in (True, False):
        torch.manual_seed(0)
        model = counted(loss, "head")
        model.head.append(nn.BatchNorm1d(CLASSES, dtype=torch.float64))
        model.head[0].register_forward_hook(model.head[0].hook)
        if not is_tried:
            monkeypatch.setattr("gpipe.model._conventions.find_convention", lambda *_: None)
        with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, blocks="layers")) as pipe:
            torch.manual_seed(0)
            random.seed(0)
            pipe.step(**batch(4, CLASSES))
            found.append([dict(pipe.named_buffers()), counters(model).seen, counters(model).hooked, states()])
    assert found[0][1:] == found[1][1:]
    torch.testing.assert_close(found[0][0], found[1][0])


def test_blocks_run_once_on_threads_of_forwards() -> None:
    pipe, _ = new(by_items)
    found: list[tuple[str, str]] = []
    for name in pipe.block_names:
        block = pipe[:].get_submodule(name)
        block.register_forward_pre_hook(lambda *_, name=name: found.append((name, threading.current_thread().name)))
    with closing(pipe):
        pipe.checkpoint = "never"
        for _ in range(3):
            found.clear()
            pipe.step(**batch(4))
            assert Counter(name for name, _ in found) == dict.fromkeys(pipe.block_names, 2)
            assert all(thread.startswith("gpipe forward") for _, thread in found)


@pytest.mark.parametrize("losses", [(by_items, contrast), (by_items, of_next_token), (contrast, by_items)])
def test_a_loss_may_be_set_later(losses: tuple[Loss, Loss]) -> None:
    pipe, plain = new(losses[0])
    with closing(pipe):
        schedule_of_second_step(pipe, plain)
        pipe[:].loss = plain.loss = losses[1]
        expected = "1f1b" if losses[1] in BY_ITEMS else "fill_drain"
        assert schedule_of_second_step(pipe, plain) == expected


class Configured(Model):
    """Has a balancing loss if its configuration says so."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.config = SimpleNamespace(balances=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return {"loss": output["loss"] + (output["logits"].mean().square() if self.config.balances else 0)}


def test_a_configuration_may_be_set_later() -> None:
    pipe, plain = new(by_items, Configured)
    with closing(pipe):
        for balances, name in ((False, "1f1b"), (True, "fill_drain"), (False, "1f1b")):
            pipe[:].config.balances = plain.config.balances = balances
            assert schedule_of_second_step(pipe, plain) == name


class Scaled(Model):
    """Has an additional term, whose coefficient is a buffer."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.register_buffer("factor", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return {"loss": output["loss"] + self.factor * output["logits"].mean().square()}


def test_coefficient_of_loss_may_change_later() -> None:
    pipe, plain = new(by_items, Scaled)
    with closing(pipe):
        for factor in (0.0, 0.5):
            for each in (pipe[:], plain):
                each.factor.fill_(factor)
            assert schedule_of_second_step(pipe, plain) == ("fill_drain" if factor else "1f1b")


class Restless(Model):
    """An attribute changes with each call."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def test_trials_of_changing_model_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []
    known = "gpipe.model._conventions.find_convention"
    monkeypatch.setattr(known, lambda *_: trials.append(0))
    pipe, plain = new(by_items, Restless)
    with closing(pipe):
        for _ in range(9):
            assert_same(pipe, plain, batch(4))
    assert 0 < len(trials) < 9


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    found: list[str] = []
    with caplog.at_level(logging.WARNING, "gpipe"):
        yield found
    found += [record.message for record in caplog.records if "not known how their losses add up" in record.message]


@pytest.mark.parametrize("loss", [by_items, contrast])
def test_full_batch_loss_is_logged_once(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    pipe, _ = new(loss)
    with closing(pipe), logged(caplog) as found:
        for _ in range(3):
            pipe.step(**batch(4))
    assert len(found) == (loss not in BY_ITEMS)


@pytest.mark.parametrize("in_spec", [None, {"tokens": Split(1), "labels": Split(1)}])
def test_labels_not_split_by_rows_are_not_tested(in_spec: Any) -> None:
    plain = Model(by_items)
    inputs = {name: value for name, value in batch(4, 4, 4).items() if name != "ends"}
    with closing(GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=2, in_spec=in_spec)) as pipe:
        for _ in range(2):
            assert_same(pipe, plain, inputs)
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == ("fill_drain" if in_spec else "1f1b")


def test_explicit_reductions_take_precedence() -> None:
    pipe, plain = new(by_items)
    inputs = batch(4)
    count = (inputs["labels"] != IGNORED).sum()
    expected = plain(**inputs)["loss"].detach()
    own = lambda output: LossSum(output["loss"] * count, count)  # noqa: E731
    with closing(pipe):
        for _ in range(2):
            summed = pipe.step(**inputs, num_items_in_batch=count, reduction="sum")
            torch.testing.assert_close(summed, expected)
            loss, output = pipe.step(**inputs, return_outputs=True)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(output["loss"], expected)
            whole = pipe.step(**inputs, loss_fn=own)
            assert whole.isfinite()


@pytest.mark.parametrize("items", [11, 2.5, torch.tensor(11)])
def test_number_of_items_may_be_replicated(items: Any) -> None:
    pipe, _ = new(by_items)
    with closing(pipe):
        for method in (pipe.step, pipe.evaluate):
            expected = method(**batch(4, 5), num_items_in_batch=items)
            torch.testing.assert_close(method(**batch(4, 5), num_items_in_batch=Replicate(items)), expected)
