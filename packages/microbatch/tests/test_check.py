from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from microbatch import Replicate, check

from .strategies import Output, Pair, Problem, Sample, problems

x = torch.tensor(42)


@given(problems())
def test_what_scatter_takes_passes(problem: Problem) -> None:
    check(problem.value, problem.spec)


@pytest.mark.parametrize("value", [x, (x,), (x, x), (), None, (x, None), [x], {"a": {"b": x}}, Sample(x, None)])
def test_tensors_and_none_pass_by_themselves(value: Any) -> None:
    check(value)


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (42, "input", "int"),
        ("str", "input", "str"),
        ((x, 2), r"input\[1\]", "int"),
        ((x, (None, 2.5)), r"input\[1\]\[1\]", "float"),
        ({"mask": [x, "causal"], "z": 1}, r"input\['mask'\]\[1\]", "str"),
        ({3: object()}, r"input\[3\]", "object"),
        (Pair(x, {1, 2}), r"input\.right", "set"),
        (Sample(x, 3), r"input\.label", "int"),
        (Output(logits=x, n=3), r"input\['n'\]", "int"),
        ((i for i in "x"), "input", "generator"),
    ],
)
def test_the_first_other_thing_is_named(value: Any, path: str, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^{path} is of type {kind}, which cannot be split; .*Replicate\(\)"):
        check(value)


def test_replicated_things_pass() -> None:
    check((x, 2), (None, Replicate()))
    check((2, "x"), Replicate())


def test_packed_sequences_do_not_pass() -> None:
    with pytest.raises(TypeError, match=r"^input\['x'\]\.data belongs to a PackedSequence"):
        check({"x": nn.utils.rnn.pack_sequence([torch.ones(2, 1)])})
