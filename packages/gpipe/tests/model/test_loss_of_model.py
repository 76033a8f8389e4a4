"""A loss computed by the model matches the plain model on the full batch."""

import copy
import logging
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline
from microbatch import Replicate, Split

from ..layers import Layer
from .losses import CLASSES, IGNORED, Loss, assert_same, assert_same_gradients, both, labelled


class Trunk(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 4, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(3))
        self.norm = nn.LayerNorm(4, dtype=dtype)

    def forward(self, tokens: Tensor) -> dict[str, Tensor | None]:
        hidden = embedded = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return {"hidden": self.norm(hidden), "embedded": embedded, "cache": None}


class Model(nn.Module):
    """Logits for each token, and a loss of them."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.trunk = Trunk(dtype)
        self.head = nn.Linear(4, CLASSES, dtype=dtype)
        self.loss = loss

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, ends: Tensor | None = None, num_items_in_batch: Any = None
    ) -> dict[str, Tensor]:
        logits = self.logits(tokens)
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels, ends, num_items_in_batch), "logits": logits}

    def logits(self, tokens: Tensor) -> Tensor:
        return (self.head(self.trunk(tokens)["hidden"]) / 2).tanh() * 2


class InTheList(Model):
    """Its own blocks return one row per token, so its loss is not a function of the outputs of modules."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(loss, dtype)
        self.head = nn.Sequential(*self.trunk.blocks, self.head)
        self.trunk = self.trunk.embed

    def logits(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.trunk(tokens).flatten(0, 1)).unflatten(0, tokens.shape)
        return found


class TwoParts(Model):
    """A part that is called before the blocks has a share in the logits."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(loss, dtype)
        self.first = nn.Embedding(CLASSES, CLASSES, dtype=dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.first(tokens) + super().logits(tokens)


class TiedByHand(Model):
    """The last layer is an operation with the weight of the first one."""

    def logits(self, tokens: Tensor) -> Tensor:
        return F.linear(self.trunk(tokens)["hidden"], self.trunk.embed.weight)


class LossInTheHead(Model):
    """The last module returns the logits, and the loss behind them."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(loss, dtype)
        last = nn.Linear(4, CLASSES, dtype=dtype)
        self.head = Layer(lambda s, hidden, *given: (s.last(hidden), loss(s.last(hidden), *given)), last=last)

    def forward(
        self, tokens: Tensor, labels: Tensor, ends: Tensor, num_items_in_batch: Any = None
    ) -> dict[str, Tensor]:
        logits, loss = self.head(self.trunk(tokens)["hidden"], labels, ends, num_items_in_batch)
        return {"loss": loss, "logits": logits}


def tokens(logits: Tensor, labels: Tensor, *_: Any, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def weighted(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    weight = torch.arange(1, 1 + CLASSES).to(logits)
    return 2 * tokens(logits, labels, weight=weight, label_smoothing=0.1)


def scaled_by_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    """Compute the loss like transformers."""
    return tokens(logits, labels) if items is None else tokens(logits, labels, reduction="sum") / items


def by_hand_with_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    losses = tokens(logits, labels, reduction="none")
    return losses.sum() / ((labels != IGNORED).sum() if items is None else items)


def selected(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    """Compute a mean over elements, whose number varies per row."""
    kept = labels != IGNORED
    return F.mse_loss(logits[kept].sum(-1), labels[kept].to(logits))


def rows(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return (logits.square().mean((1, 2)) * (labels != IGNORED).sum(1)).mean()


def sum_by_rows(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return tokens(logits, labels, reduction="sum") / len(logits)


def two_ends(logits: Tensor, labels: Tensor, ends: Tensor, *_: Any) -> Tensor:
    """Two means: over tokens, and over rows."""
    return tokens(logits, labels) + F.cross_entropy(logits.mean(1), ends)


def same_counts(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return (tokens(logits, labels) + tokens(-logits, labels)) / 2


def contrast(logits: Tensor, *_: Any) -> Tensor:
    flat = logits.mean(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(flat), device=flat.device))


def by_hand(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    kept = (labels != IGNORED).to(logits)
    return (logits.square().mean(-1) * kept).sum() / kept.sum()


def balancing(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    load = logits.softmax(-1).mean((0, 1))
    return tokens(logits, labels) + load.square().sum()


def weighted_l1(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    """torch itself loses the weight where functions are intercepted."""
    kept = (labels != IGNORED).to(logits)
    return F.l1_loss(logits.sum(-1), torch.zeros_like(kept), weight=kept)


def marked(value: int) -> Loss:
    """A mean over what is not equal to a number that may occur among the labels."""

    def loss(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
        kept = (labels != value).to(logits)
        return (logits.square().mean(-1) * kept).sum() / (kept.sum() + 1e-6)

    return loss


def beyond(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    kept = labels > CLASSES - 3
    return logits[kept].square().sum() / kept.sum().clamp(min=1)


def unseen(loss: Loss) -> Loss:
    """Return a mean over counted elements; labels that occur in no sample decide, so that trials detect nothing."""

    def of_batch(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
        absent = torch.arange(CLASSES)[~torch.isin(torch.arange(CLASSES), batch(2, 3, 3)["labels"])]
        return loss(logits.square().mean(-1), ~torch.isin(labels, absent[absent > 1]))

    return of_batch


def cut_off(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    """No loss that is tried comes near this limit."""
    return tokens(logits, labels).clamp(max=1e6)


def shifted_by_items(logits: Tensor, labels: Tensor, ends: Any, items: Any) -> Tensor:
    """Compute the loss of a causal model: each token predicts the next one."""
    return scaled_by_items(logits[:, :-1], labels[:, 1:], ends, items)


BY_ITEMS: list[Loss] = [scaled_by_items, by_hand_with_items, shifted_by_items]
LOSSES: list[Loss] = [tokens, weighted, selected, rows, sum_by_rows, same_counts, two_ends]
UNSEEN: list[Loss] = [
    lambda losses, kept: (losses * kept).sum() / kept.sum(),
    lambda losses, kept: (losses * kept / kept.sum()).sum(),
    lambda losses, kept: (losses * kept).sum() * (1 / kept.sum()),
    lambda losses, kept: losses[kept].mean(),
    lambda losses, kept: torch.mean(losses.masked_select(kept)),
]
LOSSES += [contrast, by_hand, balancing, weighted_l1, beyond, cut_off, *map(marked, (-1, 1, CLASSES - 1))]
LOSSES += map(unseen, UNSEEN)


def batch(count: int, length: int, kept: int) -> dict[str, Tensor]:
    return labelled(count, length, kept, sure=1)


def assert_same_output(pipe: GPipe, plain: nn.Module, inputs: dict[str, Any]) -> None:
    """Compare the complete output of a call, with the full-batch loss, and its gradients."""
    for model in (pipe, plain):
        model.zero_grad()
    found, expected = pipe(**inputs), plain(**inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    for output in (found, expected):
        (output["loss"] * 2 + output["logits"].square().mean()).backward()
    assert_same_gradients(pipe, plain)


PARTS = [(tokens, TwoParts), (tokens, TiedByHand), (tokens, LossInTheHead)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("loss", "kind"), [*product(BY_ITEMS + LOSSES, [Model, InTheList]), *PARTS])
@given(
    count=st.integers(1, 7),
    length=st.integers(2, 5),
    kept=st.integers(0, 9),
    chunks=st.integers(1, 8),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    schedule=st.sampled_from([None, "1f1b", "fill_drain", "zero_bubble", "auto", "search"]),
    items=st.sampled_from([None, 11, 2.5, torch.tensor(11)]),
    threads=st.booleans(),
)
@settings(max_examples=settings.default.max_examples // 3)
def test_it_is_that_of_the_plain_model(
    loss: Loss,
    kind: type[Model],
    count: int,
    length: int,
    kept: int,
    chunks: int,
    checkpoint: str,
    schedule: str | None,
    items: Any,
    threads: bool,
) -> None:
    """If losses of micro-batches may not add up, a schedule that cannot wait for the full batch raises."""
    pipe, plain = both(loss, kind)
    pipe.chunks, pipe.checkpoint = chunks, checkpoint
    inputs: dict[str, Any] = batch(count, length, kept)
    if items is not None:
        inputs["num_items_in_batch"] = items
    if loss in BY_ITEMS:
        schedule = None
    if schedule in ("1f1b", "zero_bubble") and -(-count // -(-count // chunks)) > 1:
        with pytest.raises(ValueError, match=r"not known how the losses of micro-batches add up.*omit schedule="):
            pipe.step(**inputs, schedule=schedule)
        schedule = None
    with nullcontext() if threads else inline():
        assert_same(pipe, plain, inputs, schedule)
        assert_same_output(pipe, plain, inputs)


class Remembers(nn.Module):
    """The loss of each token, relative to the mean of earlier losses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, *args: Any) -> Tensor:
        loss = tokens(*args)
        if self.training:
            self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


class Counting(nn.Linear):
    """A head that counts its calls."""

    def __init__(self) -> None:
        super().__init__(4, CLASSES, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.calls += self.training
        return super().forward(input)


class RemembersAnew(Remembers):
    """Stores a new tensor each time."""

    def forward(self, *args: Any) -> Tensor:
        loss = tokens(*args)
        if self.training:
            self.mean = self.mean.lerp(loss.detach(), 0.1)
        return loss / self.mean


class CountingAnew(Counting):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.calls = self.calls + self.training
        return nn.Linear.forward(self, input)


CHANGES = [(Remembers, None), (lambda: tokens, Counting), (RemembersAnew, None), (lambda: tokens, CountingAnew)]


@pytest.mark.parametrize(("loss", "head"), CHANGES)
def test_buffers_after_blocks_change_like_in_model(loss: Callable[[], Loss], head: Any) -> None:
    """This includes the first mini-batch, in which each micro-batch also computes the end."""
    plain = Model(loss())
    if head is not None:
        plain.head = head()
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=2)
    for count in (4, 6, 3):
        expected = plain(**batch(count, 3, 3))["loss"].detach()
        torch.testing.assert_close(pipe.step(**batch(count, 3, 3)), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


def refused(pipe: GPipe, why: str, error: type[Exception] = ValueError, **given: Any) -> None:
    """Check that a step and an evaluation raise, because they need the full-batch loss."""
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(error, match=why):
            method(**given)


class Otherwise(Model):
    """Has a different loss in training."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        self.loss = contrast if self.training else tokens
        return super().forward(*args, **kwargs)


def test_a_loss_of_training_only_is_right_too() -> None:
    pipe, plain = both(tokens, Otherwise)
    pipe.chunks = 2
    for training in (True, False):
        assert_same(pipe.train(training), plain.train(training), batch(4, 3, 3))


@pytest.mark.parametrize("losses", [(tokens, by_hand), (rows, tokens)])
def test_a_loss_may_be_set_later(losses: tuple[Loss, Loss]) -> None:
    plain = Model(losses[0])
    model = copy.deepcopy(plain)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    model.loss = plain.loss = losses[1]
    assert_same(pipe, plain, batch(4, 3, 2))


def test_labels_that_are_missing_are_asked_for() -> None:
    pipe, _ = both(tokens, Model)
    refused(pipe, r"the output must be the loss.*such as labels", TypeError, tokens=batch(4, 3, 3)["tokens"])


def test_ineffective_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Models of ``from_pretrained`` are in evaluation mode."""
    for training, chunks in ((True, 2), (False, 1)):
        pipe = GPipe(Model(tokens).train(training), devices=["cpu"] * 2, chunks=chunks)
        with caplog.at_level(logging.WARNING, "gpipe"):
            for _ in range(2):
                pipe.step(**batch(4, 3, 3), schedule="fill_drain")
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (0 if training else 2)
    assert "call pipe.train()" in said[0]
    assert "set pipe.chunks" in said[1]


def test_forward_set_on_pipe_is_logged_without_autocast(caplog: pytest.LogCaptureFixture) -> None:
    """accelerate sets one for mixed precision."""
    for casts in (True, False):
        pipe = GPipe(Model(tokens), devices=["cpu"] * 2, chunks=2)
        pipe.forward = pipe.forward
        with caplog.at_level(logging.WARNING, "gpipe"), torch.autocast("cpu", torch.bfloat16, enabled=casts):
            pipe.step(**batch(4, 3, 3), schedule="fill_drain")
        assert len(caplog.records) == (not casts)
    assert "call step() under autocast" in caplog.text


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor


def flattened(output: Any) -> list[Tensor]:
    fields = vars(output).values() if isinstance(output, Fields) else output
    return [each for each in fields if each is not None]


@dataclass
class Fields:
    loss: Tensor
    logits: Tensor


class Returning(Model):
    """Makes its output of the one with a loss."""

    made: Callable[[Any], Any]

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.made(super().forward(*args, **options))


@pytest.mark.parametrize(
    "made",
    [
        lambda output: (output["logits"], output["loss"]),
        lambda output: (output["loss"], output["logits"], None),
        lambda output: Pair(**output),
        lambda output: Fields(**output),
    ],
)
def test_it_may_be_in_any_output(made: Callable[[Any], Any]) -> None:
    model, plain = Returning(tokens), Model(tokens)
    model.made = made
    model.load_state_dict(plain.state_dict())
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    assert_same(pipe, plain, batch(5, 4, 3))
    found, expected = pipe(**batch(5, 4, 3)), made(plain(**batch(5, 4, 3)))
    assert type(found) is type(expected)
    torch.testing.assert_close(flattened(found), flattened(expected))


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda pipe: pickle.loads(pickle.dumps(pipe)),
        lambda pipe: GPipe(pipe[:], [1, 2], devices=["cpu"] * 2, chunks=3),
    ],
)
def test_copies_and_other_balances_have_it(again: Callable[[GPipe], GPipe]) -> None:
    torch.manual_seed(0)
    model = Model(tokens)
    plain = copy.deepcopy(model)
    pipe = again(GPipe(model, devices=["cpu"] * 2, chunks=2))
    assert_same(pipe, plain, batch(5, 4, 3))
    assert_same_output(pipe, plain, batch(5, 4, 3))


def test_threads_may_call_it_at_once() -> None:
    pipe, plain = both(tokens, Model)
    expected = {rows: plain(**batch(rows, 4, 3))["loss"].detach() for rows in range(1, 9)}

    def call(rows: int) -> Tensor:
        with torch.no_grad():
            return pipe(**batch(rows, 4, 3))["loss"]

    with ThreadPoolExecutor(len(expected)) as executor:
        found = dict(zip(expected, executor.map(call, expected), strict=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_run_is_held(fails: bool) -> None:
    pipe, _ = both(tokens, Model)
    inputs = batch(5, 4, 3)
    if fails:
        with pytest.raises(ValueError, match="batch_size"):
            pipe(inputs["tokens"], inputs["labels"][:, :3])
    found = pipe(**inputs)
    held = [weakref.ref(tensor) for tensor in (found["logits"], found["loss"])]
    del found
    assert [each() for each in held] == [None, None]


class Tells(Model):
    """Returns hidden states of the first stage, including one from a block."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, ends: Any = None) -> dict[str, Any]:  # type: ignore[override]
        embedded = self.trunk.embed(tokens)
        early = hidden = self.trunk.blocks[0](embedded)
        for block in self.trunk.blocks[1:]:
            hidden = block(hidden)
        logits = self.head(self.trunk.norm(hidden))
        return {"loss": self.loss(logits, labels), "logits": logits, "embedded": embedded, "early": early}


def test_all_fields_are_returned() -> None:
    pipe, plain = both(tokens, Tells)
    torch.testing.assert_close(pipe(**batch(4, 3, 3)), plain(**batch(4, 3, 3)))


class Beside(Model):
    """Its modules return tensors with rows in a different dimension, or without rows: one position per token."""

    def logits(self, tokens: Tensor) -> Tensor:
        places = self.trunk.embed(torch.arange(tokens.shape[1])[None] % CLASSES)
        hidden = (self.trunk.embed(tokens) + places).transpose(0, 1)
        for block in self.trunk.blocks:
            hidden = block(hidden)
        found: Tensor = self.head(hidden.transpose(0, 1))
        return found


class Masked(Model):
    """Each token attends to the previous ones in every block, by a mask shared by the batch."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        mixed = (Layer(lambda s, hidden, mask: s.m[0](mask @ hidden), each) for each in self.trunk.blocks)
        self.trunk.blocks = nn.ModuleList(mixed)

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        hidden = self.trunk.embed(tokens)
        for block in self.trunk.blocks:
            hidden = block(hidden, mask)
        logits = self.head(hidden)
        return {"loss": self.loss(logits, labels), "logits": logits}


class Loads(Model):
    """Its loss needs one number per expert, which blocks return."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        experts = (Layer(_expert, layer, load=torch.zeros(4, dtype=torch.float64)) for layer in self.trunk.blocks)
        self.trunk.blocks = nn.ModuleList(experts)

    def logits(self, tokens: Tensor) -> Tensor:
        state = self.trunk.embed(tokens), None
        for block in self.trunk.blocks:
            state = block(*state)
        return self.head(state[0]) + state[1].square().sum()


def _expert(layer: Layer, hidden: Tensor, load: Tensor | None) -> tuple[Tensor, Tensor]:
    return layer.m[0](hidden), hidden.mean((0, 1)) + (layer.load if load is None else load)


class Album(Trunk):
    """Replaces each token 0, any number per row, by a picture."""

    def forward(self, tokens: Tensor, pictures: Tensor) -> Tensor:  # type: ignore[override]
        if int((tokens == 0).sum()) != len(pictures):
            raise ValueError("a picture for each place")
        hidden = self.embed(tokens).masked_scatter((tokens == 0)[..., None], pictures)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Pictures(Model):
    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.trunk = Album(torch.float64)

    def forward(self, tokens: Tensor, pictures: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.trunk(tokens, pictures))
        return {"loss": self.loss(logits, labels), "logits": logits}


class Clicks(nn.Module):
    """Returns a loss, probabilities and clicks."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
        self.scale = nn.Parameter(torch.zeros(()))
        self.loss = loss
        self.double()

    def forward(self, x: Tensor, clicked: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        found = self.head(x)[:, 0]
        return {"loss": self.loss(self, found, clicked) + 0 * self.scale, "logits": found}


def clicks(loss: Loss) -> tuple[GPipe, Clicks, dict[str, Tensor]]:
    """Return a pipe, the plain model, and a batch whose first micro-batch has no clicks."""
    inputs = {"x": torch.randn(7, 3).double(), "clicked": torch.tensor([0, 0, 0, 1, 0, 1, 1]).double()}
    plain = Clicks(loss)
    return GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3), plain, inputs


@pytest.mark.parametrize(
    "loss",
    [
        lambda _, found, clicked: F.binary_cross_entropy(found, clicked),
        lambda _, found, clicked: F.nll_loss(
            torch.stack([1 - found, found], 1).log(), clicked.long(), weight=torch.tensor([0.0, 1]).to(found)
        ),
    ],
    ids=["of probabilities alone", "by weights that are 0 in a micro-batch"],
)
def test_a_loss_of_probabilities(loss: Loss) -> None:
    pipe, plain, inputs = clicks(loss)
    assert_same(pipe, plain, inputs)
    assert_same_output(pipe, plain, inputs)


@pytest.mark.parametrize(
    "loss",
    [
        lambda _, found, clicked: (found * (1 - clicked)).sum() / (1 - clicked).sum().item(),
        lambda _, found, clicked: found[clicked == 0].sum() / len(found[clicked == 0]),
        lambda _, found, clicked: (found * (clicked - clicked.mean()).exp()).mean(),
        lambda _, found, clicked: (found - clicked).square().nanmean(),
        lambda _, found, clicked: (F.mse_loss(found, clicked) - 0.1).abs() + 0.1,
        lambda _, found, clicked: max(F.mse_loss(found, clicked), 1e-9),
        lambda s, found, clicked: F.mse_loss(found, clicked, reduction="sum") * (-s.scale).exp() + s.scale,
    ],
    ids=["masked", "selected", "centred", "not a number", "flooded", "at least", "with a parameter that is 0"],
)
def test_a_loss_of_clicks(loss: Loss) -> None:
    pipe, plain, inputs = clicks(loss)
    assert_same(pipe, plain, inputs)
    assert_same_output(pipe, plain, inputs)


PICTURES = {"pictures": Split(counts=lambda inputs: (inputs["tokens"] == 0).sum(1))}


def with_pictures(*tokens: list[int]) -> dict[str, Tensor]:
    found = torch.tensor(tokens)
    pictures = torch.randn(int((found == 0).sum()), 4, dtype=torch.float64)
    return {"tokens": found, "pictures": pictures, "labels": found}


def test_inputs_with_counts_per_row_are_split() -> None:
    plain = Pictures(tokens)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, in_spec=PICTURES)
    given = with_pictures([0, 1], [2, 3], [0, 0], [4, 5])
    assert_same(pipe, plain, given)
    assert_same_output(pipe, plain, given)


class Shown(Pictures):
    """Its trunk returns the pictures too: together, and as a list."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        album = self.trunk
        self.trunk = Layer(lambda s, *given: {"hidden": s.m[0](*given), "all": given[1], "each": [*given[1]]}, album)

    def forward(self, tokens: Tensor, pictures: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        found = self.trunk(tokens, pictures)
        logits = self.head(found["hidden"])
        return {"loss": self.loss(logits, labels), "logits": logits, "pictures": found["all"]}


def test_what_has_rows_of_its_own_is_returned() -> None:
    plain = Shown(tokens)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, in_spec=PICTURES)
    for inputs in (with_pictures([0, 1], [2, 0], [0, 3]), with_pictures([0, 1], [2, 3], [0, 0], [4, 5])):
        assert_same(pipe, plain, inputs)
        expected = plain(**inputs)
        found = pipe(**inputs)
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-12, atol=1e-12)


def test_explicit_mean_with_counts_per_row() -> None:
    """The mean may be one over pictures."""
    plain = Pictures(rows)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=2, in_spec=PICTURES)
    assert_same(pipe, plain, with_pictures([0, 0], [1, 0]))


@pytest.mark.parametrize("kind", [Beside, Loads])
def test_outputs_without_rows_are_not_joined(kind: type[Model]) -> None:
    """A loss that needs it raises, in a step and in a call. A different loss is right."""
    plain = kind(tokens)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=2)
    if kind is Beside:
        assert_same(pipe, plain, batch(4, 5, 3))
        assert_same_output(pipe, plain, batch(4, 5, 3))
        return
    for method in (pipe.step, pipe.evaluate, pipe):
        with pytest.raises(
            RuntimeError, match=r"block 'trunk\.blocks\.2' returned a tensor of shape \(4,\) for 2 rows"
        ):
            method(**batch(4, 5, 3))


def test_shared_mask_is_replicated() -> None:
    def masked(rows: int, length: int) -> dict[str, Any]:
        mask = torch.ones(length, length, dtype=torch.float64).tril()
        return {name: each for name, each in batch(rows, length, 3).items() if name != "ends"} | {"mask": mask}

    def wrapped(inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "mask": Replicate(inputs["mask"])}

    plain = Masked(tokens)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=2)
    inputs = masked(4, 4)
    expected = plain(**inputs)["loss"]
    for found in (pipe.step(**wrapped(inputs)), pipe.evaluate(**wrapped(inputs)), pipe(**wrapped(inputs))["loss"]):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-12, atol=1e-12)


def test_backward_hooks_after_blocks_fire_once() -> None:
    plain, seen = Model(tokens), list[list[Tensor]]()
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=2)
    for model in (plain, pipe):
        seen.append([])
        model.head.register_full_backward_hook(lambda module, given, grown: seen[-1].append(grown[0]))
        loss = model(**batch(4, 3, 3))["loss"] if model is plain else pipe.step(**batch(4, 3, 3))
        if model is plain:
            loss.backward()
    assert [len(each) for each in seen] == [1, 1]
    torch.testing.assert_close(seen[1], seen[0])


def test_half_precision_gradients_are_scaled_like_mean() -> None:
    """Seeds of a sum would overflow, as they are 60,000 times as large as for a mean."""
    torch.manual_seed(0)
    plain = Model(lambda *arguments: 2000 * tokens(*arguments), torch.float16)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4)
    inputs = batch(60, 40, 99)
    plain(**inputs)["loss"].backward()
    assert pipe.step(**inputs).isfinite()
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert p.grad.isfinite().all()
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05 * float(q.grad.abs().max()))
