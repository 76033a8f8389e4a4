"""torch's own losses add up over micro-batches, whatever their means divide by; what is none of them does not."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe
from gpipe.module._torch_losses import torch_loss
from microbatch import Split

from ..layers import DOUBLE, MODES, assert_same, linears, piped, rows
from ..schedules import ALONE

PAD = -100
Loss = Callable[..., Any]


class Shaped(nn.Module):
    """Gives each row some tokens: an output of (rows, classes, tokens)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.layer, self.tokens = nn.Linear(3, 3 * max(1, tokens), dtype=DOUBLE), tokens

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return found.unflatten(1, (3, self.tokens)) if self.tokens else found


def models(tokens: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*linears(2), Shaped(tokens))


@st.composite
def of_labels(draw: st.DrawFn) -> tuple[Loss, Tensor, int]:
    """A loss over labels, its target, and the tokens of a row; 0 for a label for each row."""
    count, tokens = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    ignored = draw(st.sampled_from([PAD, 1]))
    size = count * max(1, tokens)
    flat = torch.tensor(draw(st.lists(st.sampled_from([ignored, 0, 2]), min_size=size, max_size=size)))
    target = flat.view(count, tokens) if tokens else flat
    options: dict[str, Any] = {} if ignored == PAD and draw(st.booleans()) else {"ignore_index": ignored}
    if draw(st.booleans()):
        options["weight"] = torch.tensor(draw(st.sampled_from([[1.0, 2, 3], [0.0, 1, 0.5], [0.0, 0, 0]])), dtype=DOUBLE)
    if draw(st.booleans()):
        options["reduction"] = draw(st.sampled_from(["mean", "sum"]))
    if draw(st.booleans()):
        return (nn.NLLLoss(**options) if draw(st.booleans()) else partial(F.nll_loss, **options)), target, tokens
    if "weight" not in options and draw(st.booleans()):
        options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2]))
    return (
        (nn.CrossEntropyLoss(**options) if draw(st.booleans()) else partial(F.cross_entropy, **options)),
        target,
        tokens,
    )


ELEMENTS: dict[str, Callable[[str], list[Loss]]] = {
    "mse": lambda r: [F.mse_loss, nn.MSELoss(reduction=r), partial(F.mse_loss, reduction=r)],
    "l1": lambda r: [F.l1_loss, nn.L1Loss(reduction=r)],
    "smooth l1": lambda r: [F.smooth_l1_loss, nn.SmoothL1Loss(reduction=r, beta=0.3)],
    "huber": lambda r: [F.huber_loss, nn.HuberLoss(reduction=r, delta=0.2), partial(F.huber_loss, delta=0.3)],
    "logits": lambda r: [
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss(reduction=r, pos_weight=torch.tensor(2.0)),
        partial(F.binary_cross_entropy_with_logits, reduction=r, pos_weight=torch.tensor([[3.0]])),
    ],
    "divergence": lambda r: [
        F.kl_div,
        nn.KLDivLoss(reduction=r),
        partial(F.kl_div, reduction="batchmean"),
        nn.KLDivLoss(reduction="batchmean", log_target=True),
    ],
    "probabilities of classes": lambda r: [
        F.cross_entropy, nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3], dtype=DOUBLE), reduction=r, label_smoothing=0.1)
    ],
}  # fmt: skip


@st.composite
def of_elements(draw: st.DrawFn) -> tuple[Loss, Tensor, int]:
    count, tokens = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    name = draw(st.sampled_from(sorted(ELEMENTS)))
    loss_fn = draw(st.sampled_from(ELEMENTS[name](draw(st.sampled_from(["mean", "sum"])))))
    shape = (count, 3, tokens) if tokens else (count, 3)
    target = torch.rand(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    if name not in ("divergence", "logits", "probabilities of classes") and tokens and draw(st.booleans()):
        target = target[:, :1]  # broadcast over classes
    return loss_fn, target, tokens


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning", "ignore:reduction.*mean.*divides:UserWarning")
@settings(max_examples=2 * settings.default.max_examples)
@given(
    of_labels() | of_elements(), st.integers(1, 9), st.sampled_from(MODES), st.sampled_from([None, *ALONE]),
    st.sampled_from([None, "mean"]),
)  # fmt: skip
def test_torch_loss_matches_full_batch(
    case: tuple[Loss, Tensor, int], chunks: int, mode: str, schedule: str | None, reduction: str | None
) -> None:
    loss_fn, target, tokens = case
    x, model = rows(len(target)), models(tokens)
    expected = loss_fn(model(x), target)
    expected.backward()
    with closing(piped(models(tokens), [1, 2], chunks=chunks, checkpoint=mode)) as pipe:
        loss = pipe.step(x, target, loss_fn=loss_fn, schedule=schedule, reduction=reduction)
        torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
        torch.testing.assert_close(pipe.evaluate(x, target, loss_fn=loss_fn), expected.detach(), equal_nan=True)
        if expected.isfinite():
            assert_same(pipe, model)
        else:  # nothing counts, in torch nan or zeros
            assert all(not parameter.grad.any() for parameter in pipe.parameters())
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == (schedule or "1f1b")


class MyCrossEntropy(nn.CrossEntropyLoss):
    """May do anything."""


def hooked() -> nn.Module:
    loss_fn = nn.MSELoss()
    loss_fn.register_forward_hook(lambda module, args, output: output.sqrt())
    return loss_fn


def patched() -> nn.Module:
    loss_fn = nn.MSELoss()
    loss_fn.forward = lambda output, target: (output - target).abs().max()  # type: ignore[method-assign]
    return loss_fn


LABELS, CLASSES = torch.tensor([0, 1, PAD, 2, PAD, 1]), torch.rand(6, 3, dtype=DOUBLE)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning")
@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (MyCrossEntropy(), LABELS),
        (hooked(), rows()),
        (patched(), rows()),
        (lambda output, target: F.mse_loss(output, target).sqrt(), rows()),
        (partial(F.cross_entropy, size_average=False), LABELS),
        (partial(F.cross_entropy, reduce=True, size_average=True), LABELS),
        (partial(F.binary_cross_entropy_with_logits, weight=torch.rand(6, 1, dtype=DOUBLE)), CLASSES),
        (nn.BCEWithLogitsLoss(pos_weight=torch.rand(6, 1, dtype=DOUBLE)), CLASSES),
        (partial(F.cross_entropy, weight=torch.rand(3, dtype=DOUBLE, requires_grad=True)), LABELS),
        (partial(partial(F.mse_loss), rows()), None),
        (nn.GaussianNLLLoss(), None),
        (F.cosine_embedding_loss, None),
        (nn.TripletMarginLoss(), None),
        (nn.CTCLoss(), None),
        (torch.nn.functional.multi_margin_loss, LABELS),
        (F.cross_entropy, torch.rand(3)),
        (F.mse_loss, torch.tensor(1.0)),
        (F.mse_loss, [rows()]),
        (F.cross_entropy, None),
        (F.cross_entropy, torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.uint8)),
        (nn.CrossEntropyLoss(torch.tensor([0.0, 1, 1], dtype=DOUBLE), label_smoothing=0.1), LABELS),
        (nn.KLDivLoss(reduction="batchmean"), Split(rows(), dim=1)),
    ],
)
def test_what_is_not_known_to_add_up(loss_fn: Any, target: Any) -> None:
    assert torch_loss(loss_fn, target) is None
    if isinstance(target, Tensor) and target.shape[:1] == (6,):  # computed once, as any other loss
        model, pipe = linears(), piped(linears(), [1, 2], chunks=4)
        try:
            loss_fn(model(rows()), target).backward()
        except RuntimeError:  # torch takes none of these labels, or no gradient of a weight
            return
        pipe.step(rows(), target, loss_fn=loss_fn)
        assert_same(pipe, model)


def test_row_weights_and_class_weights_are_distinguished() -> None:
    """Class weights are supported. Row weights would be broadcast to micro-batches."""
    of_classes = partial(F.binary_cross_entropy_with_logits, pos_weight=torch.rand(3, dtype=DOUBLE))
    assert torch_loss(of_classes, CLASSES) is not None
    of_rows = partial(F.binary_cross_entropy_with_logits, weight=torch.rand(6, 1, dtype=DOUBLE))
    for loss_fn, chunks in ((of_classes, 2), (of_rows, 2), (of_rows, 6)):
        model, pipe = linears(), piped(linears(), [1, 2], chunks=chunks)
        loss_fn(model(rows()), CLASSES).backward()
        pipe.step(rows(), CLASSES, loss_fn=loss_fn)
        assert_same(pipe, model)


def test_target_broadcast_over_rows_raises() -> None:
    """torch itself warns about it. A function that wraps torch's gets the full batch, and is allowed."""
    target = rows()[:, 0]
    pipe = piped(linears(), [1, 2], chunks=2)
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(ValueError, match=r"output of \(3, 3\) with a target of \(3,\).*reshape.*full mini-batch"):
            method(rows(), target, loss_fn=F.mse_loss)
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_in_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    """The sum over a micro-batch would overflow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 50, dtype=dtype))
    pipe = GPipe(nn.Sequential(*map(_copied, model)), [1, 1], devices=["cpu"] * 2, chunks=2)
    x, target = 100 * torch.randn(20_000, 3).to(dtype), torch.randint(50, (20_000,))
    target[:12_000] = PAD
    expected = F.cross_entropy(model(x), target)
    expected.backward()
    loss = pipe.step(x, target, loss_fn=F.cross_entropy)
    torch.testing.assert_close(loss, expected.detach(), rtol=2e-2, atol=2e-2)
    for found, own in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad, rtol=5e-2, atol=5e-2 * float(own.grad.abs().max()))


def _copied(layer: nn.Module) -> nn.Module:
    own = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
    own.load_state_dict(layer.state_dict())
    return own


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it since 2.13")
@given(
    st.lists(st.sampled_from([PAD, 0, 1, 2]), min_size=1, max_size=8),
    st.sampled_from([{}, {"reduction": "sum"}, {"weight": torch.tensor([1.0, 2, 3], dtype=DOUBLE)}, {"bias": True}]),
    st.integers(1, 4),
    st.sampled_from(MODES),
)
def test_fused_linear_loss_counts_labels(labels: list[int], options: dict[str, Any], chunks: int, mode: str) -> None:
    target, x = torch.tensor(labels), rows(len(labels))
    torch.manual_seed(0)
    loss_fn = nn.LinearCrossEntropyLoss(3, 3, dtype=DOUBLE, **options)
    assert torch_loss(loss_fn, target) is not None
    plain, own = linears(2), list(loss_fn.parameters())
    with closing(piped(plain, [1, 1], chunks=chunks, checkpoint=mode)) as pipe:
        found = pipe.step(x, target, loss_fn=loss_fn, schedule="1f1b")
        gradients = [parameter.grad for parameter in own]
        loss_fn.zero_grad()
        expected = loss_fn(plain(x), target)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), equal_nan=True)
        torch.testing.assert_close(gradients, [parameter.grad for parameter in own], equal_nan=True)
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)
    loss_fn.linear.register_forward_hook(lambda *_: None)
    assert torch_loss(loss_fn, target) is None
