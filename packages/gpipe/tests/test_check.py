"""check() names planted faults, each in its own layer, and finds nothing in models that train the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import Arguments, Report, check, flatten
from gpipe.skip import pop, skippable, stash

WIDTH, ROWS = 16, 32


class Call(nn.Module):
    """A layer of one function, with modules that it may use."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.modules_ = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.modules_)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x


class RowEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: len(x)]


class ScalesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * len(gradient)


class ClipsGradient(torch.autograd.Function):
    """Divides the gradient by its norm, which is that of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def attention(x: Tensor, module: nn.Module) -> Tensor:
    return module(x[:, None], x[:, None], x[:, None])[0][:, 0]


FAULTS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), {"batchnorm"}),
    "batch norm without running statistics": (
        lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
        {"batchnorm"},
    ),
    "batch norm beside dropout": (lambda: nn.Sequential(nn.Dropout(), nn.BatchNorm1d(WIDTH)), {"random", "batchnorm"}),
    "softmax over rows": (lambda: nn.Softmax(0), {"mixes-rows"}),
    "mean over rows": (lambda: Call(lambda x: x - x.mean(0)), {"mixes-rows"}),
    "attention across rows": (lambda: Call(attention, nn.MultiheadAttention(WIDTH, 2)), {"mixes-rows"}),
    "shifted rows": (lambda: Call(lambda x: x.roll(1, 0)), {"mixes-rows"}),
    "rows sorted": (lambda: Call(lambda x: x.sort(0).values), {"mixes-rows"}),
    "dropout": (lambda: nn.Dropout(), {"random"}),
    "noise in evaluation too": (lambda: Call(lambda x: x + torch.randn_like(x)), {"random"}),
    "in place": (lambda: Call(lambda x: x.mul_(2)), {"in-place"}),
    "counts in Python": (Remembers, {"stateful"}),
    "counts in a buffer": (Counts, {"stateful"}),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(linear()), {"stateful"}),
    "Python's random numbers": (lambda: Call(lambda x: x * random.random()), {"impure"}),
    "NumPy's random numbers": (lambda: Call(lambda x: x * np.random.rand()), {"impure"}),
    "a running mean": (RunningMean, {"buffers"}),
    "an embedding of rows": (RowEmbedding, {"rows"}),
    "divided by rows": (lambda: Call(lambda x: x / len(x)), {"rows"}),
    "rows summed up": (lambda: Call(lambda x: x.sum(0)), {"rows-lost"}),
    "another number of rows": (lambda: Call(lambda x: x[: ROWS // 2]), {"rows-lost"}),
    "a fixed number of rows": (lambda: Call(lambda x: x.view(ROWS, WIDTH)), {"hard-coded-batch"}),
    "a gradient scaled by rows": (lambda: Call(lambda x, m: ScalesGradient.apply(m(x)), linear()), {"gradient"}),
    "a gradient clipped over rows": (lambda: Call(lambda x: ClipsGradient.apply(x)), {"gradient"}),
    "frozen": (lambda: linear().requires_grad_(False), {"frozen"}),
    "single precision inside": (lambda: Call(lambda x: rounded(x.float()).to(x.dtype)), {"reassociation"}),
}


LOSE_ROWS = {"rows summed up", "another number of rows"}
"""After these, later layers have nothing to get wrong."""


def rounded(x: Tensor) -> Tensor:
    """``x``, rounded by the number of rows."""
    return x * (len(x) + 1) / (len(x) + 1)


def between(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(), nn.GELU(), layer, linear())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_in_its_layer_alone(name: str) -> None:
    torch.manual_seed(0)
    make, codes = FAULTS[name]
    report = check(between(make()), torch.randn(ROWS, WIDTH))
    assert {(finding.layer, finding.code) for finding in report.findings} == {("2", code) for code in codes}
    assert report.ok == all(finding.level == "note" for finding in report.findings)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None])[0][:, 0]


class Masked(nn.Module):
    """Gives on a mask that is the same for all rows, beside the rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.arange(WIDTH) > 3


class Unmasked(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] * value[1]


CLEAN: dict[str, Callable[[], nn.Sequential]] = {
    "perceptron": lambda: nn.Sequential(linear(), nn.GELU(), linear()),
    "one layer": lambda: nn.Sequential(linear()),
    "layer norm": lambda: between(nn.LayerNorm(WIDTH)),
    "group norm": lambda: between(nn.GroupNorm(4, WIDTH)),
    "batch norm in evaluation": lambda: between(nn.BatchNorm1d(WIDTH).eval()),
    "softmax over columns": lambda: between(nn.Softmax(1)),
    "skip": lambda: nn.Sequential(linear(), Stash(), linear(), Pop(), linear()),
    "recurrent": lambda: between(Recurrent()),
    "mask for all rows": lambda: nn.Sequential(linear(), Masked(), Unmasked(), linear()),
    "convolution": lambda: between(Call(lambda x, m: m(x[:, None])[:, 0], nn.Conv1d(1, 1, 3, padding=1))),
    "nested": lambda: between(nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()))),
    "weight norm": lambda: between(nn.utils.parametrizations.weight_norm(linear())),
}


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_a_clean_model(name: str) -> None:
    torch.manual_seed(0)
    report = check(CLEAN[name](), torch.randn(ROWS, WIDTH), chunks=3)
    assert report.findings == ()
    assert report.ok
    assert len(report.compared) >= 4  # all but interleaving, which needs an even number of stages


@given(st.data())
@settings(max_examples=6)
def test_several_faults_are_named_each_where_it_is(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FAULTS.keys() - LOSE_ROWS)), min_size=2, max_size=3))
    made = [FAULTS[name] for name in names]
    layers = [layer for make, _ in made for layer in (linear(), make())]
    expected = {(str(2 * k + 1), code) for k, (_, codes) in enumerate(made) for code in codes}
    report = check(nn.Sequential(*layers, linear()), torch.randn(ROWS, WIDTH))
    assert {(finding.layer, finding.code) for finding in report.findings} == expected


def test_a_tied_parameter_is_noted_once() -> None:
    first, last = linear(), linear()
    last.weight = first.weight
    report = check(nn.Sequential(first, last), torch.randn(ROWS, WIDTH), balance=[2])
    assert [(finding.code, finding.layer) for finding in report.findings] == [("tied", "0")]
    assert "0.weight, 1.weight" in report.findings[0].evidence


FORMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "of the output alone": (lambda output: output.square().mean(), False),
    "of no target": (lambda output, target: output.square().mean(), False),
    "metrics": (lambda output, target: (F.mse_loss(output, target), {"largest": output.max()}), True),
    "sum, count and metrics": (
        lambda output, target: ((output - target).square().sum(), output.numel(), {"largest": output.max()}),
        True,
    ),
    "a module": (nn.MSELoss(), True),
}


class TestLoss:
    def targets(self) -> Tensor:
        return torch.where(torch.arange(ROWS) % 5 == 0, -100, torch.arange(ROWS) % WIDTH)

    def test_a_mean_over_some_rows_is_no_plain_mean(self) -> None:
        report = check(CLEAN["perceptron"](), torch.randn(ROWS, WIDTH), target=self.targets(), loss_fn=F.cross_entropy)
        assert [finding.code for finding in report.findings] == ["loss"]

    def test_a_sum_with_its_count_is_right(self) -> None:
        def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()

        assert check(CLEAN["perceptron"](), torch.randn(ROWS, WIDTH), target=self.targets(), loss_fn=loss_fn).ok

    def test_a_plain_mean_is_right(self) -> None:
        target = torch.randn(ROWS, WIDTH)
        assert check(CLEAN["perceptron"](), torch.randn(ROWS, WIDTH), target=target, loss_fn=F.mse_loss).ok

    @pytest.mark.parametrize("name", FORMS)
    def test_every_form_that_step_takes_is_taken(self, name: str) -> None:
        loss_fn, has_target = FORMS[name]
        target = torch.randn(ROWS, WIDTH) if has_target else None
        report = check(CLEAN["perceptron"](), torch.randn(ROWS, WIDTH), target=target, loss_fn=loss_fn)
        assert report.findings == ()
        assert report.compared


class OwnLoss(nn.Module):
    """Returns what models of Hugging Face do, as the last layer or as a whole model."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.square().mean(), "logits": x}


class Classifier(nn.Module):
    """Computes its loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([linear(), linear()]), linear()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class TestModelsThatReturnTheirLoss:
    @pytest.mark.parametrize("rows", [ROWS, ROWS - 3])
    def test_a_plain_mean_is_right(self, rows: int) -> None:
        report = check(nn.Sequential(linear(), OwnLoss()), torch.randn(rows, WIDTH))
        assert report.findings == ()
        assert report.compared

    def test_a_scalar_is_the_loss(self) -> None:
        assert check(between(Call(lambda x: x)).append(Call(lambda x: x.mean())), torch.randn(ROWS, WIDTH)).ok

    def test_a_sum_is_no_plain_mean(self) -> None:
        report = check(nn.Sequential(linear(), Call(lambda x: x.sum())), torch.randn(ROWS, WIDTH))
        assert [finding.code for finding in report.findings] == ["loss"]

    @pytest.mark.parametrize("flat", [False, True])
    def test_a_model_with_labels(self, flat: bool) -> None:
        batch = {"x": torch.randn(ROWS, WIDTH), "labels": torch.arange(ROWS) % WIDTH}
        report = check(flatten(Classifier(), batch) if flat else Classifier(), batch)
        assert report.findings == ()
        assert report.compared

    def test_one_with_padding_is_no_plain_mean(self) -> None:
        labels = torch.where(torch.arange(ROWS) % 5 == 0, -100, torch.arange(ROWS) % WIDTH)
        report = check(Classifier(), {"x": torch.randn(ROWS, WIDTH), "labels": labels})
        assert [finding.code for finding in report.findings] == ["loss"]


@pytest.mark.parametrize(
    "last",
    [linear().requires_grad_(False), Call(lambda x: x.detach()), Call(lambda x: x.argmax(1))],
    ids=["frozen", "detached", "integers"],
)
def test_what_cannot_be_trained_is_said(last: nn.Module) -> None:
    report = check(nn.Sequential(linear().requires_grad_(False), last), torch.randn(ROWS, WIDTH))
    assert "untrained" in [finding.code for finding in report.findings]
    assert not report.ok


def test_keywords_of_the_first_layer() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    batch = {"x": torch.randn(ROWS, WIDTH), "scale": torch.randn(ROWS, WIDTH)}
    assert check(nn.Sequential(Scaled(WIDTH, WIDTH), linear()), Arguments((), batch)).findings == ()


class TestNoHarm:
    def test_the_model_and_all_generators_stay_as_they_are(self) -> None:
        model = between(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(WIDTH)))
        model[0].weight.grad = torch.ones_like(model[0].weight)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
        check(model, torch.randn(ROWS, WIDTH, generator=torch.Generator()))
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1:] == (random.getstate(), np.random.get_state()[1].tobytes())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
        assert model[0].weight.dtype == torch.float32
        assert model.training


class TestReport:
    def report(self) -> Report:
        return check(between(nn.Softmax(0)), torch.randn(ROWS, WIDTH))

    def test_the_text_names_layer_evidence_and_advice(self) -> None:
        text = str(self.report())
        assert "error[mixes-rows]: layer '2' (Softmax): an output row depends on other rows" in text
        assert "changing row 0" in text
        assert "  = compute each row by itself" in text
        assert text.splitlines()[-2].startswith("1 error: 4 layers, 32 rows in 4 micro-batches, in float64")

    def test_the_json_has_all_of_it(self) -> None:
        found = json.loads(self.report().to_json())
        assert not found["ok"]
        assert [(each["code"], each["layer"], each["level"]) for each in found["findings"]] == [
            ("mixes-rows", "2", "error")
        ]


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"model": "model"}, TypeError, "model must be an nn.Module; got str"),
            ({"sample": torch.randn(1, WIDTH)}, ValueError, "sample has a single row"),
            ({"chunks": 1}, ValueError, "chunks must be at least 2"),
            ({"chunks": "4"}, TypeError, "chunks"),
            ({"balance": [1]}, ValueError, "balance"),
            ({"target": torch.zeros(ROWS)}, TypeError, "a target is given, but no loss_fn"),
            ({"target": torch.zeros(ROWS), "loss_fn": lambda output: 0}, TypeError, "loss_fn takes the output alone"),
            ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function"),
            ({"loss_fn": lambda output: output}, ValueError, "expected a scalar"),
            ({"model": nn.Sequential()}, ValueError, "model has no layers"),
            ({"sample": torch.randn(ROWS, 3)}, RuntimeError, "shapes cannot be multiplied"),
        ],
    )
    def test_it_is_refused_by_name(self, changes: dict[str, Any], error: type[Exception], message: str) -> None:
        given: dict[str, Any] = {"model": CLEAN["perceptron"](), "sample": torch.randn(ROWS, WIDTH), **changes}
        with pytest.raises(error, match=message):
            check(given.pop("model"), given.pop("sample"), **given)
