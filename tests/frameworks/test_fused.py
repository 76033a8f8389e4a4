"""Trainer with a fused loss: kernels that replace the forward of a model, before or after the pipe is made."""

import sys
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from gpipe import GPipe

from .families import transformers
from .pipelined import pipelined

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
WORDS = 64


class Fused(Function):
    """Cross entropy of hidden states and the weight of a head, with gradients that its forward computes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str) -> Tensor:
        own = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(*own), labels, reduction=reduction)
        ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None, None


def fused_forward(
    self: Any, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
) -> Any:
    """A language model's forward that computes no logits in training, like Liger's."""
    hidden = self.model(input_ids=input_ids, **inputs)[0]
    if labels is None or not self.training:
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=WORDS)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)
    reduction = "mean" if num_items_in_batch is None else "sum"
    shifted = hidden[:, :-1].flatten(0, 1), self.lm_head.weight, labels[:, 1:].flatten()
    loss = Fused.apply(*shifted, reduction)
    return transformers.modeling_outputs.CausalLMOutputWithPast(
        loss=loss if num_items_in_batch is None else loss / num_items_in_batch
    )


def apply_to(model: Any, **_: Any) -> None:
    model.forward = MethodType(fused_forward, model)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point that Trainer calls; Liger's own kernels need a GPU."""
    package, inside = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    inside._apply_liger_kernel_to_instance = apply_to  # type: ignore[attr-defined]
    for module in (package, inside):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(transformers.integrations.liger, "is_liger_kernel_available", lambda: True)


def llama(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=WORDS,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def batch() -> dict[str, Tensor]:
    words = torch.randint(WORDS, (12, 8), generator=torch.Generator().manual_seed(0))
    labels = words.clone()
    labels[0, 3:] = labels[4, :5] = -100
    return {"input_ids": words, "labels": labels}


def trained(model: nn.Module, folder: Path, *, applies: bool) -> list[list[float]]:
    words = batch()
    data = [{name: tensor[k] for name, tensor in words.items()} for k in range(12)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=6, per_device_eval_batch_size=6, learning_rate=1e-2,
        logging_steps=1, eval_strategy="steps", eval_steps=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, seed=0, use_liger_kernel=applies,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    return [
        [entry[key] for entry in trainer.state.log_history if key in entry]
        for key in ("loss", "eval_loss", "grad_norm")
    ]


@pytest.mark.parametrize("when", ["before", "by Trainer"])
@pytest.mark.parametrize("tied", [False, True])
def test_losses_are_those_of_the_plain_model(tied: bool, when: str, tmp_path: Path) -> None:
    expected = trained(llama(tied=tied), tmp_path, applies=False)
    model = llama(tied=tied)
    if when == "before":
        apply_to(model)
    pipe = GPipe(model, devices=["cpu", "cpu"], chunks=3)
    with pipelined(pipe, 2, microbatches=3):
        found = trained(pipe, tmp_path, applies=when != "before")
    assert ("forward" in vars(pipe)) == (when != "before")
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == 3
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_steps_interleave_backwards_if_applied_before(tied: bool) -> None:
    plain, model = llama(tied=tied), llama(tied=tied)
    apply_to(model)
    plain(**batch()).loss.backward()
    pipe = GPipe(model, devices=["cpu", "cpu"], chunks=3)
    for schedule in ("fill_drain", "1f1b"):
        pipe.zero_grad()
        with pipelined(pipe, 4, microbatches=3):
            pipe.step(**batch())
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == schedule
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    pipe.close()
