"""Models of transformers as its own tests configure them, which a checkout of its repository has and the package not.

The environment variable ``TRANSFORMERS_REPOSITORY`` names the folder of the checkout.
"""

import copy
import importlib
import os
import random
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests
from gpipe import Arguments

from ..own_forward import CHUNKS, Case, NotComparableError, leaves, mean_square

transformers = pytest.importorskip("transformers", reason="transformers is not installed; see nox -s outside")

VARIABLE = "TRANSFORMERS_REPOSITORY"
ROWS = 6
APART = {
    "AlignVisionModel": "its gradients are nearly zero",
    "AutoformerForPrediction": "the rounding of its encoder depends on the rows, which shows in a small element",
    "AutoformerModel": "its rounding depends on the rows: in micro-batches its output is off by 0.3 %",
    "DebertaV2ForMultipleChoice": "its gradients are nearly zero",
    "DeepseekVLHybridForConditionalGeneration": "its rows depend on each other",
    "DeepseekVLHybridModel": "its rows depend on each other",
    "GraniteSpeechForConditionalGeneration": "its rows depend on each other",
    "IBertForMaskedLM": "it rounds by the range of the full batch",
    "IBertForQuestionAnswering": "it rounds by the range of the full batch",
    "IBertForTokenClassification": "it rounds by the range of the full batch",
    "IBertModel": "it rounds by the range of the full batch",
    "LevitForImageClassificationWithTeacher": "its gradients are nearly zero",
    "LevitModel": "its gradients are nearly zero",
}
"""Classes whose plain model does not equal itself in micro-batches, or on a different processor."""


def folder() -> Path | None:
    """Return the folder of the tests, or None if it is not set."""
    named = os.environ.get(VARIABLE)
    return Path(named) / "tests" if named else None


def files() -> list[str]:
    """The files with tests of models, as ``bert/test_modeling_bert``."""
    found = folder()
    if found is None:
        return []
    return sorted(f"{path.parent.name}/{path.stem}" for path in found.glob("models/*/test_modeling_*.py"))


def cases(file: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each class of models that a file tests, with the test case that makes its inputs.

    Raises:
        NotComparableError: the tests require a different version of transformers, or missing packages.
    """
    seen = set()
    for value in vars(_module(file)).values():
        if not (isinstance(value, type) and issubclass(value, unittest.TestCase)):
            continue
        if not hasattr(value, "_prepare_for_class") or value.__module__ != _name(file):
            continue
        test: Any = value()
        try:
            test.setUp()
        except Exception as error:
            raise NotComparableError(f"{value.__name__} is not made: {error!r:.300}") from error
        for kind in test.all_model_classes or ():
            if kind.__name__ not in seen and kind.__name__ not in APART:
                seen.add(kind.__name__)
                yield kind.__name__, test


def case(name: str, test: Any) -> Case:
    """A model with a batch of six rows, without dropout.

    Raises:
        NotComparableError: the test makes none with this version of transformers.
    """
    torch.manual_seed(0)
    random.seed(0)
    try:
        kind = next(kind for kind in test.all_model_classes if kind.__name__ == name)
        if hasattr(test.model_tester, "batch_size"):
            test.model_tester.batch_size = ROWS
        config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
        inputs = test._prepare_for_class(inputs, kind, return_labels=True)
        inputs = {key: value for key, value in inputs.items() if value is not None}
        model = kind(config).train()
    except Exception as error:
        raise NotComparableError(f"not made: {error!r:.300}") from error
    without_dropout(model)
    return compared(model, inputs)


def compared(model: nn.Module, inputs: dict[str, Any]) -> Case:
    """A case whose loss is the model's, where it has one."""
    try:
        output = copy.deepcopy(model)(**copy.deepcopy(inputs))
        own = isinstance(getattr(output, "loss", None), Tensor)
        apart = rows_are_apart(model, inputs, output)
    except Exception as error:
        raise NotComparableError(f"{error!r:.300}") from error
    return Case(model, Arguments((), inputs), None if own else loss, 1e-3, apart)


def loss(output: Any) -> Tensor:
    """Return a loss that mixes rows."""
    first = next(leaf for _, leaf in leaves(output) if leaf.is_floating_point() and leaf.dim() > 1)
    return (first - first.mean(0)).square().sum().sqrt() + first.square().mean()


def rows_are_apart(model: nn.Module, inputs: dict[str, Any], whole: Any) -> bool:
    """Return whether the mean of the micro-batches' losses equals the mini-batch's loss.

    An error is the model's own, which does not take such micro-batches.
    """
    sizes = {len(leaf) for _, leaf in leaves(inputs) if leaf.dim()}
    if len(sizes) > 1:
        return False
    rows, losses = sizes.pop(), []
    for part in torch.arange(rows).chunk(CHUNKS):
        cut = {key: value[part] if _has_rows(value, rows) else value for key, value in inputs.items()}
        losses.append(mean_square(copy.deepcopy(model)(**copy.deepcopy(cut))) * len(part) / rows)
    return bool(torch.isclose(torch.stack(losses).sum(), mean_square(whole), rtol=1e-5, atol=1e-7))


def without_dropout(model: nn.Module) -> None:
    """Disable dropout in layers and inputs, in numbers that modules pass to functions, and in their settings."""
    settings = [getattr(module, "config", None) for module in model.modules()]
    for each in [*model.modules(), *settings]:
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(each, name, 0.0)
            if name == "apply_spec_augment":
                setattr(each, name, False)
        if isinstance(each, nn.Dropout):
            each.p = 0.0


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def _name(file: str) -> str:
    return f"tests.models.{file.replace('/', '.')}"


def _module(file: str) -> Any:
    """Import a module of tests. transformers also names its package ``tests``, so both packages are merged.

    Raises:
        NotComparableError: it requires something missing, such as classes of a later transformers.
    """
    found = folder()
    if found is not None and str(found) not in tests.__path__:
        tests.__path__.append(str(found))
        sys.path += [str(found.parent), str(found.parent / "utils")]  # they import from both
    try:
        return importlib.import_module(_name(file))
    except Exception as error:
        raise NotComparableError(f"{file} cannot be imported: {error!r:.300}") from error
