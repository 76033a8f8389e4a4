"""A pipe computes what its model does: random models, random cuts, against the model itself.

Where the plain model on the whole mini-batch is no oracle, because a layer looks at the batch as a whole, the plain
loop over the micro-batches is. Where layers draw, what every mode of the pipe computes from one seed must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

import gpipe
from gpipe import GPipe
from microbatch import Batch, gather

from .layers import MODES, running
from .models import PARTS, Recipe, recipes

STEADY = tuple(name for name, part in PARTS.items() if not part.draws)
OVERWRITING = ("linear", *(name for name in STEADY if PARTS[name].in_place or PARTS[name].output != "free"))
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@SLOW
@given(recipes(STEADY), st.booleans())
def test_pipe_is_its_model(recipe: Recipe, inline: bool):
    model = recipe.model()
    with closing(pipe_of(recipe, model)) as pipe, running(inline):
        oracle = Oracle(recipe, model)
        for x in recipe.batches():
            expected, found = trained(oracle, x, recipe), trained(pipe, x, recipe)
            assert_close(found, expected, recipe)
            step(model)
            step(pipe)
        assert_close(dict(pipe.state_dict()), dict(model.state_dict()), recipe)


@SLOW
@given(recipes(OVERWRITING))
def test_layers_that_overwrite_what_is_needed_give_the_right_gradient_or_an_error(recipe: Recipe):
    recipe = replace(recipe, overwrites=True)
    x, model = recipe.batches()[0], recipe.model()
    with closing(pipe_of(recipe, model)) as pipe, gpipe.inline():
        try:
            found = trained(pipe, x, recipe)
        except RuntimeError as refusal:
            assert "inplace" in str(refusal) or "in place" in str(refusal)  # noqa: PT017
            return
    for layer in model.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
    assert_close(found, trained(model, x, recipe), recipe)


@settings(SLOW, max_examples=SLOW.max_examples // 2)
@given(recipes())
def test_modes_agree_about_random_numbers(recipe: Recipe):
    """Not only nearly: checkpointing repeats the same kernels, and threads change no order of sums."""
    ways = [
        *((mode, True) for mode in MODES),
        ("never", False),
        (recipe.modes(len(recipe.balance(len(recipe.model())))), False),
    ]
    recipe = replace(recipe, training=True, checkpoint="always")
    results = [lived(recipe, mode, inline) for mode, inline in ways]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)


def pipe_of(
    recipe: Recipe, model: nn.Sequential, checkpoint: Any = None, devices: Callable[[int], list[str]] | None = None
) -> GPipe:
    """A pipe of a copy of ``model``, with stages on the CPU unless ``devices`` says where so many are."""
    balance = recipe.balance(len(model))
    return GPipe(
        copy.deepcopy(model),
        balance,
        devices=devices(len(balance)) if devices else ["cpu"] * len(balance),
        chunks=recipe.chunks,
        checkpoint=checkpoint or recipe.modes(len(balance)),
        deferred_batch_norm=recipe.deferred,
    )


class Oracle(nn.Module):
    """The model on the whole mini-batch, or where that is something else by design, on the micro-batches in a row."""

    def __init__(self, recipe: Recipe, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe

    def forward(self, x: Tensor) -> Any:
        if not self.recipe.by_microbatch:
            return self.model(x)
        seen = WholeNorms(self.model) if self.recipe.deferred and self.recipe.training else None
        with seen or nullcontext():
            return gather([Batch(self.model(part.clone())) for part in x.chunk(self.recipe.chunks)])


class WholeNorms:
    """What deferred batch norm promises: statistics that are updated once, with all rows of the mini-batch."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and m.track_running_stats]
        self._seen = [(norm, copy.deepcopy(norm), []) for norm in norms if norm.training]

    def __enter__(self) -> None:
        self._hooks = [
            norm.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].detach().clone()))
            for norm, _, rows in self._seen
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for norm, whole, rows in self._seen:
            whole(torch.cat(rows))
            for own, buffer in zip(norm.buffers(), whole.buffers(), strict=True):
                own.data.copy_(buffer)  # unseen by autograd, for which the backward of this forward is still to come


def trained(model: nn.Module, x: Tensor, recipe: Recipe) -> dict[str, Any]:
    """All that one forward and backward leaves behind."""
    if not recipe.accumulates:
        model.zero_grad()
    leaf = x.clone().requires_grad_(recipe.input_needs_grad)
    output = model(leaf * 1)
    loss = weighed(output, recipe)
    if loss.requires_grad:
        loss.backward()
    parameters = model.named_parameters()
    gradients = {name.removeprefix("model."): None if p.grad is None else p.grad.clone() for name, p in parameters}
    return {"output": _pytree.tree_map_only(Tensor, Tensor.detach, output), "input": leaf.grad, **gradients}


def weighed(output: Any, recipe: Recipe) -> Tensor:
    """A loss in which every number of the output counts, and none as much as another."""
    generator = torch.Generator().manual_seed(recipe.seed)
    floats = [t for t in _pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not floats:
        return torch.zeros(())
    weights = [torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in floats]
    return torch.stack([(t * w).mean() for t, w in zip(floats, weights, strict=True)]).sum()


def step(model: nn.Module) -> None:
    """What an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def lived(recipe: Recipe, checkpoint: str | list[str], inline: bool) -> list[dict[str, Any]]:
    """What two steps of training leave behind."""
    results = []
    with closing(pipe_of(recipe, recipe.model(), checkpoint)) as pipe, running(inline):
        torch.manual_seed(recipe.seed)
        for x in recipe.batches():
            results.append(trained(pipe, x, recipe))
            step(pipe)
        results.append(dict(pipe.state_dict()))
    return results


def assert_close(found: Any, expected: Any, recipe: Recipe) -> None:
    tolerance = 1e-7 if recipe.dtype is torch.float64 else 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
