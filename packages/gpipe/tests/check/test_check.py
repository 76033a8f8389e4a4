"""check() attributes planted faults to their layers, and finds nothing in models that train the same in a pipe."""

import copy
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

from gpipe import GPipe, LossSum, Report, check

from ..clean_models import CLEAN, Clean
from ..layers import AddsLoss
from ..planted_faults import FAULTS, ROWS, WIDTH, Fault, Layer, between, linear, rows
from .listed import Listed

each_fault = pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, named in FAULTS.items() for name in named]
)


def checked(case: Fault | Clean, **settings: Any) -> Report:
    given = {"target": case.target, "loss_fn": case.loss_fn, "reduction": case.reduction}
    return check(case.model, case.sample, **given, **settings)


def accused(report: Report) -> set[tuple[str, str | None]]:
    """Return the codes and layers of errors and warnings."""
    return {(finding.code, finding.layer) for finding in report.findings if finding.level != "note"}


CODES = {
    "batch norm": "batchnorm",
    "statistics of the batch": "mixes-rows",
    "order of rows": "mixes-rows",
    "mixtures of rows": "mixes-rows",
    "noise by the batch": "mixes-rows",
    "groups of rows": "mixes-rows",
    "place of a row": "rows",
    "gradients": "gradient",
    "state": "stateful",
    "Python and clocks": "impure",
    "losses that are no mean over rows": "loss",
    "losses in which rows meet": "loss",
    "losses of the model": "loss",
    "losses with a state": "impure",
    "nothing to train": "untrained",
}
"""The common code of all faults of a kind, if they have one."""


@each_fault
def test_fault_is_attributed_to_its_layer(kind: str, name: str) -> None:
    torch.manual_seed(0)
    case = FAULTS[kind][name]()
    report = checked(case)
    assert not report.ok
    assert {layer for _, layer in accused(report)} == {case.layer}
    assert kind not in CODES or {code for code, _ in accused(report)} == {CODES[kind]}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_models_have_no_findings(name: str) -> None:
    torch.manual_seed(0)
    report = checked(CLEAN[name]())
    assert accused(report) == set()
    assert report.ok
    assert report.compared


LAYERS = [
    (kind, name)
    for kind, name in [(kind, name) for kind in FAULTS for name in FAULTS[kind]]
    if kind not in ("rows that are lost", "state of other layers", "nothing to train") and "loss" not in kind
    if name != "view of half"
]
"""Faults of a layer that preserves the number of rows. A batch of more than 16 rows is large."""


@given(st.lists(st.sampled_from(LAYERS), min_size=2, max_size=3), st.integers(17, 32), st.integers(2, 5))
@settings(max_examples=12)
def test_each_of_several_faults_is_attributed(names: list[tuple[str, str]], count: int, chunks: int) -> None:
    count = ROWS if any("fixed" in kind + name or "group" in kind for kind, name in names) else count
    faults = [FAULTS[kind][name]().model[2] for kind, name in names]
    report = check(
        nn.Sequential(*[each for fault in faults for each in (linear(), fault)]), rows()[:count], chunks=chunks
    )
    assert {layer for _, layer in accused(report)} == {str(2 * k + 1) for k in range(len(faults))}


def test_notes_and_rounding_are_not_faults() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), linear().requires_grad_(False), nn.Dropout(), linear(), linear())
    model[4].weight = model[3].weight
    layer = Layer(lambda s, x: F.layer_norm(x.float() * (len(x) + 1) / (len(x) + 1), (WIDTH,)).to(x.dtype))
    report = check(model.append(layer), rows())
    assert [(finding.layer, finding.code) for finding in report.findings] == [("2", "random")]
    assert report.ok


def test_check_leaves_model_and_generators_unchanged() -> None:
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


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "model": lambda model: model,
    "pipe": lambda model: GPipe(model, devices=["cpu"] * 2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["centred", "centred after dropout", "divided by rows"])
def test_check_uses_training_mode(name: str, form: str) -> None:
    case = FAULTS["training and evaluation differ"][name]()
    found = []
    for mode in (True, False):
        model = FORMS[form](Listed(copy.deepcopy(case.model)).train(mode))
        report = check(model, case.sample)
        assert {module.training for module in model.modules()} == {mode}
        found.append([str(finding) for finding in report.findings])
    assert not report.ok
    assert found[0] == found[1]


class Wrapped(Tensor):
    """A tensor that implements only the matrix product, like quantized weights."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_: Any) -> "Wrapped":
        return Wrapped(tensors["inner"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].inner, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kept = ("aten.detach.default", "aten.clone.default", "aten._to_copy.default", "aten.to.dtype")
        if str(func) not in kept:
            raise NotImplementedError(f"no {func} of a wrapped tensor")
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


@pytest.mark.parametrize("form", [nn.Sequential, Listed])
def test_weights_with_few_operations_are_not_faults(form: Callable[..., nn.Module]) -> None:
    layers = [linear() for _ in range(3)]
    layers[1].weight = nn.Parameter(Wrapped(layers[1].weight.detach()), requires_grad=False)
    model = nn.Sequential(*layers)
    report = check(model if form is nn.Sequential else Listed(model), rows())
    assert report.findings == ()
    assert report.compared


def test_failing_pipe_is_a_finding() -> None:
    """Batch norm raises for the last of 4 micro-batches, which has a single row."""
    found = check(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), linear()), torch.randn(5, WIDTH)).findings
    assert "pipeline" in [finding.code for finding in found]


def test_report_text_names_layer_evidence_and_advice() -> None:
    text = str(check(between(nn.Softmax(0)), rows()))
    assert "error[mixes-rows]: layer '2' (Softmax): an output row depends on other rows" in text
    assert "changing some rows" in text
    assert "  = compute each row independently" in text
    assert text.splitlines()[-3].startswith("1 error: 4 layers, 32 rows in 4 micro-batches, in float64")


def squares(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def summed(y: torch.Tensor, target: torch.Tensor) -> LossSum:
    return LossSum((y - target).square().sum(), y.numel())


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "kind"),
    [
        (squares, None, "once, on the outputs of all rows"),
        (squares, "mean", "for each micro-batch"),
        (summed, None, "for each micro-batch"),
        (F.mse_loss, None, "for each micro-batch"),
    ],
)
def test_report_says_how_loss_is_computed(
    loss_fn: Callable[..., Any], reduction: str | None, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    report = check(between(nn.GELU()), rows(), target=rows(), loss_fn=loss_fn, reduction=reduction)
    assert report.ok
    assert report.loss.startswith(f"the loss is computed {kind}")
    assert report.loss in str(report)
    assert json.loads(report.to_json())["loss"] == report.loss
    assert not caplog.records


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_wrong_reduction_is_attributed_to_loss(reduction: str) -> None:
    """Without ``reduction``, the same loss is computed once, and there are no findings."""
    target = rows() * torch.arange(1.0, ROWS + 1)[:, None]  # micro-batches differ in their losses
    given = {"target": target, "loss_fn": lambda y, t: squares(y, t).sqrt()}
    (found,) = check(between(nn.GELU()), rows(), **given, reduction=reduction).findings
    assert (found.code, found.layer) == ("loss", None)
    assert f"reduction='{reduction}' says" in found.message
    assert check(between(nn.GELU()), rows(), **given).findings == ()


def test_findings_name_norms_inside_layers() -> None:
    found = check(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))), rows()).findings
    assert [each.evidence for each in found if each.code == "batchnorm"] == ["BatchNorm1d", "1"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "model"}, TypeError, "model must be an nn.Module; got str"),
        ({"sample": torch.randn(1, WIDTH)}, ValueError, "sample has 1 rows"),
        ({"sample": torch.randn(0, WIDTH)}, ValueError, "sample has 0 rows"),
        ({"chunks": 1}, ValueError, "chunks must be at least 2"),
        ({"chunks": "4"}, TypeError, "chunks"),
        ({"balance": [1]}, ValueError, "balance"),
        ({"target": torch.zeros(ROWS)}, TypeError, "got a target but no loss_fn"),
        ({"target": torch.zeros(ROWS), "loss_fn": lambda output: 0}, TypeError, "loss_fn accepts only the output"),
        ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function"),
        ({"reduction": "none"}, ValueError, "reduction must be 'mean', 'sum' or None"),
        (
            {"loss_fn": lambda output: (output.sum(), 3)},
            ValueError,
            r"tuple of 2, .*return gpipe.LossSum\(total, count",
        ),
        ({"loss_fn": lambda output: output}, ValueError, "expected a scalar"),
        ({"model": nn.Sequential()}, ValueError, "model has no layers"),
        ({"sample": torch.randn(ROWS, 3)}, RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_invalid_arguments_raise(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"model": between(nn.GELU()), "sample": rows(), **changes}
    with pytest.raises(error, match=message):
        check(given.pop("model"), given.pop("sample"), **given)


class Experts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return AddsLoss.apply(y, y.square().mean())


def test_gradient_added_in_a_backward_is_reported() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), Experts(3, 3), nn.Linear(3, 3))
    found = check(layers, torch.rand(8, 3), chunks=4, target=torch.rand(8, 3), loss_fn=F.mse_loss)
    assert [(each.code, each.layer) for each in found.findings] == [("gradient", "1")]


class Counts(nn.Embedding):
    """An embedding that scales its gradient by frequency, although its attributes do not say so."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, scale_grad_by_freq=True)


@pytest.mark.parametrize("layer", [Counts(3, 3), nn.Embedding(3, 3, scale_grad_by_freq=True)])
def test_embeddings_scaled_by_frequency_are_reported(layer: nn.Module) -> None:
    words = torch.tensor([0, 0, 1, 2, 0, 1, 1, 1])
    found = check(nn.Sequential(layer, nn.Linear(3, 3)), words, chunks=4)
    assert [(each.code, each.layer) for each in found.findings] == [("gradient", "0")]
