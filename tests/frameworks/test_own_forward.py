"""Models of transformers in a pipe without a sample: the numbers of the plain model, whatever way they are used."""

from collections.abc import Iterable
from typing import Any

import pytest

from gpipe import Arguments

from ..own_forward import EQUAL, Case, NotComparableError, outcomes, worst
from .every_class import batch, classes, small
from .families import EVERY, ROWS, transformers
from .labelled import BATCHES, CASES, batch_of, made
from .table import result, set_dropout

pytestmark = pytest.mark.filterwarnings("ignore")
TOGETHER = ("CLIP", "SigLIP")
"""They compare each row with all others."""


def some(names: Iterable[Any], every: int) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] if k % every else []) for k, name in enumerate(names)]


def expect_equal(case: Case) -> None:
    found = outcomes(case)
    assert worst(found) == EQUAL, found


@pytest.mark.parametrize("name", some(EVERY, 4))
def test_a_family_computes_what_the_plain_model_does(name: str) -> None:
    family = EVERY[name]
    model = family.make()
    set_dropout(model, 0.0)
    inputs = Arguments((), family.inputs(ROWS))
    loss = lambda output: result(output).square().mean()  # noqa: E731
    expect_equal(Case(model, inputs, loss, max(family.tolerance, 1e-7), rows_apart=name not in TOGETHER))


@pytest.mark.parametrize("labelled", some(BATCHES, 6), ids=" ".join)
def test_model_loss_matches_full_batch(labelled: tuple[str, str]) -> None:
    name, kind = labelled
    family, _ = CASES[name]
    inputs = Arguments((), batch_of(name, ROWS + 1, kind))
    bound = max(family.tolerance, 1e-6)
    expect_equal(Case(made(family)[0], inputs, None, bound, rows_apart=name not in TOGETHER))


@pytest.mark.parametrize("name", some(sorted(classes()), 60))
def test_a_class_computes_what_the_plain_model_does(name: str) -> None:
    task = classes()[name][1]
    try:
        expect_equal(Case(small(getattr(transformers, name), task), Arguments((), batch(task))))
    except (NotComparableError, AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        pytest.skip(f"the plain model does not run: {error!r:.100}")


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT masked words", "T5"])
def test_peft_adapters_match_plain_model(name: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
    family, _ = CASES[name]
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(made(family)[0], lora).train()
    expect_equal(Case(model, Arguments((), batch_of(name, ROWS + 1, "padded")), None, max(family.tolerance, 1e-5)))
