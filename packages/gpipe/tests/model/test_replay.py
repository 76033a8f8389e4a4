"""What depends on all rows is computed once for all of them, from what blocks have returned for micro-batches."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe
from microbatch import Replicate, Split

from ..layers import MODES, Layer, assert_same, counted, each_way, rows
from .residuals import Residuals, is_first, of_function, plain_of, residuals, two_stages
from .test_forward import done


@dataclass
class Found:
    """As the outputs of models of Hugging Face."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Any = None


class Judged(Residuals):
    """Computes its own loss, of the similarities of all rows with each other."""

    def forward(self, x: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> Found:
        hidden = [self.embed(x)]
        for layer in self.layers:
            hidden.append(hidden[-1] + layer(hidden[-1]))
        logits = self.head(hidden[-1])
        loss = None
        if labels is not None and num_items_in_batch is not None:
            loss = (logits - labels).square().sum() / num_items_in_batch
        elif labels is not None:
            loss = ((logits @ logits.t()).softmax(1) * (labels @ labels.t())).mean()
        return Found(loss, logits, tuple(hidden))


def judged(blocks: int = 4) -> Judged:
    return Judged(*(nn.Linear(3, 3) for _ in range(blocks)))


def similar(output: Found, labels: Tensor) -> Tensor:
    return ((output.logits @ output.hidden[1].t()).softmax(1) * (labels @ labels.t())).mean()


sizes = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))


@given(sizes, st.sampled_from(MODES), st.integers(1, 3))
def test_a_loss_of_all_rows_is_that_of_the_model(size: tuple[int, int, int], mode: str, steps: int) -> None:
    count, chunks, stages = size
    x, labels = rows(count), rows(count) + 1
    with closing(GPipe(judged(), devices=["cpu"] * stages, chunks=chunks, checkpoint=mode)) as pipe:
        plain = plain_of(pipe)
        for _ in range(steps):
            plain.zero_grad()
            pipe.zero_grad()
            expected = plain(x, labels).loss
            expected.backward()
            torch.testing.assert_close(pipe.step(x=x, labels=labels), expected.detach())
            assert_same(pipe, plain)


@given(sizes, st.sampled_from(MODES))
def test_an_output_is_that_of_the_model_whatever_its_class(size: tuple[int, int, int], mode: str) -> None:
    count, chunks, stages = size
    x, labels = rows(count, grad=True), rows(count) + 1
    with closing(GPipe(judged(), devices=["cpu"] * stages, chunks=chunks, checkpoint=mode)) as pipe:
        plain = plain_of(pipe)
        for each in (pipe, plain):
            output = each(x, labels=labels)
            assert isinstance(output, Found)
            (output.loss + similar(output, labels)).backward()
        torch.testing.assert_close(vars(pipe(x, labels=labels)), vars(plain(x, labels=labels)))
        assert_same(pipe, plain)


def test_the_input_gets_the_gradient_of_all_its_uses() -> None:
    found = []
    for make in (lambda m: m, two_stages):
        model = judged()
        each = make(model)
        leaf = rows(6, grad=True)
        x = leaf * 2
        loss_fn = lambda output: output.logits.softmax(0).square().sum() + output.hidden[0].sum()  # noqa: E731
        if isinstance(each, GPipe):
            each.step(x, loss_fn=loss_fn)
        else:
            loss_fn(each(x)).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0])


def test_outputs_of_a_step_are_those_of_all_rows() -> None:
    x, labels = rows(6), rows(6) + 1
    with closing(two_stages(judged())) as pipe:
        expected = plain_of(pipe)(x, labels)
        for _ in range(2):
            loss, output = pipe.step(x=x, labels=labels, return_outputs=True)
            torch.testing.assert_close(loss, expected.loss.detach())
            torch.testing.assert_close(output.logits, expected.logits.detach())
            assert not output.logits.requires_grad


def test_metrics_and_outputs_of_a_loss_of_all_rows() -> None:
    def loss_fn(output: Found, labels: Tensor) -> Any:
        loss = similar(output, labels)
        output.logits.mul_(0)  # what is returned is as the model has returned it
        return loss, {"least": labels.min(), "similar": loss.detach()}

    x, labels = rows(6), rows(6) + 1
    with closing(two_stages(judged())) as pipe:
        expected = plain_of(pipe)(x)
        loss, metrics, output = pipe.evaluate(x, labels, loss_fn=loss_fn, return_outputs=True)
        torch.testing.assert_close(loss, similar(expected, labels).detach())
        torch.testing.assert_close(metrics, {"least": labels.min(), "similar": loss})
        torch.testing.assert_close(output.logits, expected.logits.detach())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "fill_drain"])
def test_a_loss_of_the_model_may_be_added_up_by_the_number_of_items(schedule: str) -> None:
    x, labels, items = rows(7), rows(7) + 1, torch.tensor(5.0)
    with closing(two_stages(judged())) as pipe:
        plain = plain_of(pipe)
        expected = plain(x, labels, items).loss
        expected.backward()
        batch = {"x": x, "labels": labels, "num_items_in_batch": items}
        torch.testing.assert_close(pipe.step(**batch, reduction="sum", schedule=schedule), expected.detach())
        assert_same(pipe, plain)


def test_a_loss_of_unknown_rule_is_refused_under_a_schedule_that_cannot_wait() -> None:
    with closing(two_stages(judged())) as pipe, pytest.raises(ValueError, match="Judged computes a loss"):
        pipe.step(x=rows(6), labels=rows(6), schedule="1f1b")


@each_way
def test_evaluate_gives_the_loss_of_all_rows(way: Callable[[], Any]) -> None:
    x, labels = rows(6), rows(6) + 1
    with closing(two_stages(judged())) as pipe, way():
        plain = plain_of(pipe).eval()
        pipe.eval()
        torch.testing.assert_close(pipe.evaluate(x=x, labels=labels), plain(x, labels).loss.detach())
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert not pipe.training


def test_with_an_out_spec_outputs_of_microbatches_are_joined() -> None:
    x = rows(7)
    with closing(two_stages(residuals(), out_spec=Split(0))) as pipe:
        torch.testing.assert_close(pipe(x), plain_of(pipe)(x))


def test_with_an_in_spec_some_arguments_are_not_cut() -> None:
    class Shifted(Residuals):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    x, shift = rows(6), torch.ones(3, dtype=torch.float64)
    model = Shifted(*(nn.Linear(3, 3) for _ in range(4)))
    with closing(two_stages(model, in_spec={"shift": Replicate()})) as pipe:
        torch.testing.assert_close(pipe(x=x, shift=shift), plain_of(pipe)(x, shift))


def test_a_forward_that_calls_other_blocks_for_all_rows_is_refused() -> None:
    class Large(Residuals):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers if len(x) > 3 else self.layers[:2]:
                x = x + layer(x)
            return x

    with closing(two_stages(Large(*(nn.Linear(3, 3) for _ in range(4))))) as pipe:
        with pytest.raises(RuntimeError, match="block"):
            pipe(rows(6))
        pipe.zero_grad()
        loss = pipe.step(rows(6), loss_fn=counted, schedule="1f1b")
        assert loss.isfinite()


def test_an_output_of_a_block_that_has_no_rows_is_refused_where_the_model_uses_it() -> None:
    model = of_function(lambda s, x: s.m[0](x).sum(0))
    with closing(two_stages(model)) as pipe, pytest.raises(RuntimeError, match=r"block 'layers\.\d'"):
        pipe(rows(6))


def test_a_loss_of_torch_is_added_up_by_itself() -> None:
    x, target = rows(7), rows(7) + 1
    with closing(two_stages(residuals())) as pipe:
        plain = plain_of(pipe)
        expected = F.mse_loss(plain(x), target)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, target, loss_fn=F.mse_loss, schedule="1f1b"), expected.detach())
        assert_same(pipe, plain)


class Sides(nn.Module):
    """Returns a tensor whose rows are in its last dimension, which nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found.t()


class Sided(Residuals):
    """Hands on what its first block returns, changed, to all others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        sides = self.layers[0](x) + 1
        for layer in self.layers[1:]:
            x = x + layer(x, sides)
        return x


@pytest.mark.parametrize("how", ["call", "whole", "evaluate"])
@pytest.mark.parametrize("mode", MODES)
def test_hooks_see_no_call_but_those_of_micro_batches(mode: str, how: str) -> None:
    model = Sided(
        Sides(), *(Layer(lambda s, x, sides: s.m[0](x) * sides.sum(0)[:, None], nn.Linear(3, 3)) for _ in range(3))
    )
    seen: list[torch.device] = []

    def see(module: nn.Module, args: Any, output: Tensor) -> None:
        if is_first():
            seen.append(output.device)

    for module in [layer for block in model.layers for layer in block.modules() if not [*layer.children()]]:
        module.register_forward_hook(see)
    with closing(two_stages(model.double(), checkpoint=mode)) as pipe:
        plain, x = plain_of(pipe), rows(6)
        for times in (1, 2):
            model.zero_grad()
            done(pipe, x, how)
            assert seen == [torch.device("cpu")] * 12 * times
        expected = plain(x).square().sum()
        if how != "evaluate":
            expected.backward()
            assert_same(model, plain)
