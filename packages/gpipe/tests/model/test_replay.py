"""Computations on the full batch run once, on the joined outputs of blocks."""

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
    """An output like Hugging Face models return."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Any = None


class Judged(Residuals):
    """Computes its own loss from the similarities of all pairs of rows."""

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
def test_full_batch_loss_matches_model(size: tuple[int, int, int], mode: str, steps: int) -> None:
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
def test_outputs_of_any_class_match_model(size: tuple[int, int, int], mode: str) -> None:
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


def test_input_gets_gradients_of_all_uses() -> None:
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


def test_step_returns_outputs_of_full_batch() -> None:
    x, labels = rows(6), rows(6) + 1
    with closing(two_stages(judged())) as pipe:
        expected = plain_of(pipe)(x, labels)
        for _ in range(2):
            loss, output = pipe.step(x=x, labels=labels, return_outputs=True)
            torch.testing.assert_close(loss, expected.loss.detach())
            torch.testing.assert_close(output.logits, expected.logits.detach())
            assert not output.logits.requires_grad


def test_metrics_and_outputs_of_full_batch_loss() -> None:
    def loss_fn(output: Found, labels: Tensor) -> Any:
        loss = similar(output, labels)
        output.logits.mul_(0)  # returned outputs are unmodified
        return loss, {"least": labels.min(), "similar": loss.detach()}

    x, labels = rows(6), rows(6) + 1
    with closing(two_stages(judged())) as pipe:
        expected = plain_of(pipe)(x)
        loss, metrics, output = pipe.evaluate(x, labels, loss_fn=loss_fn, return_outputs=True)
        torch.testing.assert_close(loss, similar(expected, labels).detach())
        torch.testing.assert_close(metrics, {"least": labels.min(), "similar": loss})
        torch.testing.assert_close(output.logits, expected.logits.detach())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "fill_drain"])
def test_model_loss_may_be_summed_by_items(schedule: str) -> None:
    x, labels, items = rows(7), rows(7) + 1, torch.tensor(5.0)
    with closing(two_stages(judged())) as pipe:
        plain = plain_of(pipe)
        expected = plain(x, labels, items).loss
        expected.backward()
        batch = {"x": x, "labels": labels, "num_items_in_batch": items}
        torch.testing.assert_close(pipe.step(**batch, reduction="sum", schedule=schedule), expected.detach())
        assert_same(pipe, plain)


def test_unknown_reduction_raises_under_eager_schedule() -> None:
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


def test_out_spec_joins_outputs_of_micro_batches() -> None:
    x = rows(7)
    with closing(two_stages(residuals(), out_spec=Split(0))) as pipe:
        torch.testing.assert_close(pipe(x), plain_of(pipe)(x))


def test_in_spec_may_replicate_arguments() -> None:
    class Shifted(Residuals):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    x, shift = rows(6), torch.ones(3, dtype=torch.float64)
    model = Shifted(*(nn.Linear(3, 3) for _ in range(4)))
    with closing(two_stages(model, in_spec={"shift": Replicate()})) as pipe:
        torch.testing.assert_close(pipe(x=x, shift=shift), plain_of(pipe)(x, shift))


def test_different_blocks_for_full_batch_raise() -> None:
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


def test_using_block_output_without_rows_raises() -> None:
    model = of_function(lambda s, x: s.m[0](x).sum(0))
    with closing(two_stages(model)) as pipe, pytest.raises(RuntimeError, match=r"block 'layers\.\d'"):
        pipe(rows(6))


def test_losses_of_torch_are_recognized() -> None:
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
    """Passes the first block's output, modified, to every other block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        sides = self.layers[0](x) + 1
        for layer in self.layers[1:]:
            x = x + layer(x, sides)
        return x


@pytest.mark.parametrize("how", ["call", "whole", "evaluate"])
@pytest.mark.parametrize("mode", MODES)
def test_hooks_fire_only_for_micro_batches(mode: str, how: str) -> None:
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
