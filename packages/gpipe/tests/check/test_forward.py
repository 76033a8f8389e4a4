"""check() of a model with a custom forward names the faulty module, or the forward itself."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.profiler.tests.packed import Adapted, PackedLinear
from torch import Tensor, nn

from gpipe import check
from microbatch import Arguments

from ..clean_models import CLEAN
from ..planted_faults import FAULTS, ROWS, WIDTH, linear, rows
from .listed import Listed
from .test_check import CODES, LAYERS, accused, checked

EACH = [(kind, name) for kind, named in FAULTS.items() for name in named]
# The rows of its output are in a different dimension, so the next block fails.
EACH.remove(("a fixed number of rows", "view of half"))
# The first needs an nn.Sequential. A pipe cannot track the rows of experts, and raises.
NOT = ("skips", "experts")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "name"), EACH)
def test_fault_is_attributed_to_its_block(kind: str, name: str) -> None:
    torch.manual_seed(0)
    case = FAULTS[kind][name]()
    report = checked(case._replace(model=Listed(case.model)))
    assert not report.ok
    assert {layer for _, layer in accused(report)} == {case.layer and f"blocks.{case.layer}"}
    assert kind not in CODES or {code for code, _ in accused(report)} == {CODES[kind]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in CLEAN if name not in NOT])
def test_clean_models_have_no_findings(name: str) -> None:
    torch.manual_seed(0)
    case = CLEAN[name]()
    if isinstance(case.model, nn.Sequential):
        sample = Arguments((case.sample,), {}) if isinstance(case.sample, dict) else case.sample
        case = case._replace(model=Listed(case.model), sample=sample)
    report = checked(case)
    assert accused(report) == set()
    assert report.ok
    assert report.compared


@given(st.lists(st.sampled_from(LAYERS), min_size=2, max_size=3), st.integers(17, 32), st.integers(2, 5))
@settings(max_examples=8)
def test_each_of_several_faults_is_attributed(names: list[tuple[str, str]], count: int, chunks: int) -> None:
    count = ROWS if any("fixed" in kind + name or "group" in kind for kind, name in names) else count
    faults = [FAULTS[kind][name]().model[2] for kind, name in names]
    # Layers after the last block with parameters run on the full batch.
    model = Listed(nn.Sequential(*[each for fault in faults for each in (linear(), fault)], linear()))
    report = check(model, rows()[:count], chunks=chunks)
    assert {layer for _, layer in accused(report)} == {f"blocks.{2 * k + 1}" for k in range(len(faults))}


class Between(nn.Module):
    """A model with four blocks, which calls ``code`` before the third one and ``end`` after the head."""

    def __init__(self, code: Callable[..., Tensor], end: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.head = linear(), linear()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0
        self.code, self.end = code, end

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for k, block in enumerate(self.blocks):
            x = block(self.code(self, x) if k == 2 else x)
        return self.end(self, self.head(x))


def same(_: Between, x: Tensor) -> Tensor:
    return x


def counted(model: Between, x: Tensor) -> Tensor:
    model.calls += 1
    return x * model.calls


def averaged(model: Between, x: Tensor) -> Tensor:
    model.mean += x.detach().mean(0)
    return x


OWN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "softmax over rows": (lambda _, x: x.softmax(0), "mixes-rows"),
    "softmax over rows before a dropout": (lambda s, x: F.dropout(x.softmax(0), 0.5, s.training), "mixes-rows"),
    "the number of rows": (lambda _, x: x / len(x), "rows"),
    "the place of a row": (lambda _, x: x + torch.arange(len(x))[:, None], "rows"),
    "a different path for large batches": (lambda s, x: s.blocks[0](x) if len(x) > 16 else x, "rows"),
    "a fixed number of rows": (lambda _, x: x.view(ROWS, WIDTH), "hard-coded-batch"),
    "a counter": (counted, "stateful"),
    "a running mean": (averaged, "buffers"),
    "Python's generator": (lambda _, x: x * random.random(), "impure"),
}


@pytest.mark.parametrize("name", OWN)
def test_faults_in_the_forward_itself_are_reported(name: str) -> None:
    torch.manual_seed(0)
    code, expected = OWN[name]
    found = [each for each in check(Between(code, same), rows()).findings if each.code != "random"]
    assert [(each.code, each.layer, each.kind) for each in found] == [(expected, None, "Between")]
    assert found[0].where == "the forward of Between: "
    if expected == "mixes-rows":
        assert "in the arguments of 'blocks.2'" in found[0].evidence


CLEAN_CODE: dict[str, Callable[..., Tensor]] = {
    "nothing": same,
    "dropout": lambda s, x: F.dropout(x, 0.5, s.training),
    "dropout in evaluation too": lambda _, x: F.dropout(x, 0.5),
    "a module that drops": lambda s, x: s.drop(x),
    "a block that is dropped in training": lambda s, x: x if s.training and torch.rand([]) < 1 else s.blocks[0](x),
    "without gradients": lambda s, x: x + torch.no_grad()(s.blocks[1])(x),
    "in place": lambda _, x: x.clone().mul_(2),
}


@pytest.mark.parametrize("name", CLEAN_CODE)
def test_allowed_code_in_the_forward_passes(name: str) -> None:
    torch.manual_seed(0)
    report = check(Between(CLEAN_CODE[name], same), rows())
    assert accused(report) == set()
    assert report.compared


@pytest.mark.parametrize(
    ("end", "code", "layer"),
    [(lambda _, x: x.softmax(0), "mixes-rows", None), (lambda s, x: s.norm(x), "batchnorm", "norm")],
)
def test_full_batch_end_may_mix_rows(end: Callable[..., Tensor], code: str, layer: str | None) -> None:
    model = Between(same, end)
    whole = check(model, rows())
    assert whole.findings == ()
    assert whole.loss.startswith("the loss is computed once")
    parts = check(model, rows(), target=rows(), loss_fn=F.mse_loss)
    assert accused(parts) == {(code, layer)}


class Losing(Between):
    """A model that returns a loss in which rows interact."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"loss": (found @ found.mT).logsumexp(1).mean(), "logits": found}


def test_model_loss_may_require_full_batch() -> None:
    model = Losing(same, same)
    assert check(model, {"x": rows()}).ok
    assert accused(check(model, {"x": rows()}, reduction="mean")) == {("loss", None)}


def test_shared_block_is_reported_once() -> None:
    block = nn.BatchNorm1d(WIDTH)
    found = check(Listed(nn.Sequential(linear(), block, linear(), block)), rows()).findings
    assert [(each.code, each.layer) for each in found] == [("batchnorm", "blocks.1")]


def test_balance_must_match_the_blocks() -> None:
    model = Between(same, same)
    assert check(model, rows(), balance=[1, 3]).ok
    with pytest.raises(ValueError, match="balance"):
        check(model, rows(), balance=[1, 1])


def test_check_leaves_the_model_unchanged() -> None:
    model = Between(counted, same)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: {*vars(module)} for name, module in model.named_modules()}
    check(model, rows())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: {*vars(module)} for name, module in model.named_modules()} == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.calls, model.head.weight.dtype) == (0, torch.float32)


def test_weights_that_deepcopy_rejects_are_supported() -> None:
    """Weights of quanto are like this."""
    model = Listed(nn.Sequential(*(Adapted(PackedLinear(6), 6) for _ in range(3))))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    assert check(model, torch.randn(6, 6)).ok
