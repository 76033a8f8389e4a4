"""Hooks on AccumulateGrad nodes, as installed by data parallelism, fire once per run."""

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe import GPipe

from ..layers import (
    ALL_ROWS,
    MODES,
    Call,
    assert_same,
    counted,
    each_mode,
    hook,
    linears,
    piped,
    rows,
    running,
    squares,
    trained,
)
from ..schedules import ALONE

NAMES = sorted(name for name, _ in linears().named_parameters())


def listening(model: nn.Module, names: set[str], calls: list[tuple[str, Tensor | None]]) -> list[Any]:
    """The nodes of some parameters, with a hook each that says what has arrived in ``.grad``."""
    nodes = []
    for name, parameter in model.named_parameters():
        if name in names:
            nodes.append(get_gradient_edge(parameter).node)
            nodes[-1].register_hook(
                lambda _, found, name=name, p=parameter: calls.append(
                    (name, None if p.grad is None else p.grad.clone())
                )
            )
    return nodes


@given(
    st.sets(st.sampled_from(NAMES)),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["see", "scale", "after"])), max_size=4),
    st.sets(st.sampled_from(NAMES), max_size=2),
    st.sampled_from([None, None, *ALONE, ALL_ROWS, ALL_ROWS]),
    st.sampled_from(MODES),
    st.booleans(),
    st.sampled_from([squares, counted]),
    st.booleans(),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([[3], [1, 2], [1, 1, 1]]),
)
def test_node_hooks_fire_like_in_plain_model(
    names: set[str], hooked: list[tuple[str, str]], filled: set[str], schedule: str | None, mode: str, inline: bool,
    loss_fn: Any, decay: bool, counts: list[int], balance: list[int],
):  # fmt: skip
    """The number of micro-batches, and other tensors that the loss reaches, do not matter."""
    decay = decay and schedule in (None, ALL_ROWS) and not hooked and not names
    model = linears()
    pipe = piped(model, balance, chunks=3, checkpoint=mode)
    results = []
    for each in (model, pipe):

        def decayed(output: Tensor, _: Any, each: nn.Module = each) -> Tensor:
            return squares(output) + sum(squares(p) for p in each.parameters())

        calls: list[tuple[str, Tensor | None]] = []
        nodes = listening(each, names, calls)
        for name, parameter in each.named_parameters():
            for k, (own, kind) in enumerate(hooked):
                if own == name:
                    hook(parameter, kind, f"{kind} {k}", calls)
            if name in filled:
                parameter.grad = torch.ones_like(parameter)
        with closing(each) if isinstance(each, GPipe) else nullcontext(), running(inline):
            for count in counts:
                trained(each, rows(count), schedule, decayed if decay else loss_fn)
        assert len(nodes) == len(names)
        results.append(sorted(calls, key=lambda call: call[0]))
    assert_same(pipe, model)
    found, expected = results
    assert [name for name, _ in found] == [name for name, _ in expected]
    torch.testing.assert_close([each for _, each in found], [each for _, each in expected])


@each_mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_runs_that_overlap(mode: str, reentrant: bool):
    """The graph of the first keeps the nodes of the second."""
    a, b, c = linears()
    model = nn.Sequential(a, Call(lambda x: torch_checkpoint(b, x, use_reentrant=reentrant)), b, c)
    pipe = GPipe(nn.Sequential(*model), [1, 3], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    (model(rows()).sum() + model(2 * rows()).sum()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (pipe(rows()).sum() + pipe(2 * rows()).sum()).backward()
    pipe.close()
    torch.testing.assert_close({name: p.grad for name, p in pipe.named_parameters()}, expected)


class Louder(GPipe):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


def test_step_rejects_overridden_forward() -> None:
    with pytest.raises(RuntimeError, match=r"evaluate\(\) .* does not call the forward of Louder"):
        Louder(linears(), [3], devices=["cpu"]).evaluate(rows(), loss_fn=lambda o: o.sum())


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_pipe_are_refused_under_step(kind: str) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    handle = getattr(pipe, f"register_{kind}_hook")(lambda *_: None)
    named = kind.removeprefix("full_").replace("_", " ")
    with pytest.raises(RuntimeError, match=rf"cannot call the {named} hooks of this pipe.*register them on"):
        pipe.step(rows(), loss_fn=lambda o, _: o.sum())
    assert all(p.grad is None for p in pipe.parameters())
    handle.remove()
    pipe.step(rows(), loss_fn=lambda o, _: o.sum())
