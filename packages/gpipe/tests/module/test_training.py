"""Arguments of ``step`` and ``evaluate`` are accepted, or raise an error that names them, with gradients unchanged."""

from collections import UserDict
from contextlib import closing
from typing import Any

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import Arguments
from gpipe.schedule import SCHEDULES
from microbatch import Replicate, Split

from ..layers import assert_same, linears, piped, rows

NAMES = (
    "input", "target", "loss_fn", "metrics", "reduction", "normalizer", "schedule", "first layer", "output", "chunks"
)  # fmt: skip
"""Names that an error may contain."""

anything = st.sampled_from(
    [None, True, 0, 3, -1.5, 2j, "mean", b"x", [], (), {}, {"x": 1}, object(), len, int, np.zeros(6), np.float64(2)]
)
tensors = st.sampled_from(
    [rows(), rows(5), rows(1), rows(0), rows().int(), rows() > 0, rows().sum(), rows()[:, 0], rows().to_sparse(),
     rows().T, rows().to(torch.complex64), rows(width=4)]
)  # fmt: skip
containers = st.one_of(
    st.tuples(tensors, anything), st.lists(tensors | anything, max_size=3),
    st.dictionaries(st.sampled_from(["x", "mask", "input", "target", "loss_fn"]), tensors | anything, max_size=3),
)  # fmt: skip
given_values = st.one_of(
    anything, tensors, containers, st.builds(UserDict, st.just({"x": rows()})), containers.map(Replicate),
    st.builds(lambda value: Split(value, dim=1), tensors), st.builds(lambda each: Arguments((each,), {}), tensors),
)  # fmt: skip


class First(nn.Module):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x


def returning(found: Any) -> Any:
    """A loss function that gives ``found``, in which "loss" stands for a real one."""

    def loss_fn(output: Tensor, target: Any = None) -> Any:
        loss = output.square().mean()
        if isinstance(found, tuple):
            return tuple(loss if each is LOSS else each for each in found)
        return loss if found is LOSS else found

    return loss_fn


LOSS = "loss"
found_values = st.one_of(
    anything, tensors, st.tuples(st.just(LOSS), anything | tensors), st.tuples(st.just(LOSS), st.just(3), anything),
    st.tuples(st.just(LOSS), st.dictionaries(st.text(max_size=2), anything | tensors, max_size=2)),
)  # fmt: skip
calls = st.fixed_dictionaries(
    {},
    optional={
        "input": given_values,
        "target": given_values,
        "x": given_values,
        "mask": given_values,
        "labels": given_values,
        "loss_fn": st.one_of(anything, found_values.map(returning)),
        "reduction": anything | st.just("sum"),
        "normalizer": anything,
        "schedule": anything | st.sampled_from(sorted(SCHEDULES)),
    },
)


@given(calls, st.booleans(), st.sampled_from(["never", "always"]), st.booleans())
@example({"x": rows(), "loss_fn": returning((LOSS, {"a": rows(5)}))}, False, "never", False)
def test_arguments_of_step_are_accepted_or_raise(arguments: dict[str, Any], evaluates: bool, mode: str, inline: bool):
    plain = nn.Sequential(First(), *linears())
    pipe = piped(plain, [2, 2], chunks=3, checkpoint=mode)
    with gpipe.inline() if inline else closing(pipe):
        method = pipe.evaluate if evaluates else pipe.step
        options = {key: value for key, value in arguments.items() if not evaluates or key != "schedule"}
        try:
            method(**options)
        except (TypeError, ValueError, RuntimeError) as error:
            told = " ".join(getattr(error, "__notes__", [str(error)]))
            assert any(name in told for name in NAMES), told
            assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.zero_grad()
        pipe.step(rows(), rows(), loss_fn=F.mse_loss)
    F.mse_loss(plain(rows()), rows()).backward()
    assert_same(pipe, plain)
