"""Layers that misbehave, in any combination: a pipe computes what the plain loop over micro-batches does, or refuses.

Whatever is done between two steps: modes, frozen layers, hooks, copies, other balances. A refusal leaves no gradients
where there were none, and has one of the types that callers expect.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.schedule import SCHEDULES, v_placement

from .layers import DOUBLE, MODES, running
from .odd_layers import HEARD, NAMES, OUTSIDE, WIDTH, Odd, draws, make
from .schedules import balance_by, suited

REFUSALS = (RuntimeError, ValueError, TypeError)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, 0.01, momentum=0.9, nesterov=True),
    "foreach": lambda own: torch.optim.SGD(own, 0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    "adam": lambda own: torch.optim.Adam(own, 0.01, eps=1e-3, amsgrad=True),
    "adamw": lambda own: torch.optim.AdamW(own, 0.01, eps=1e-3, foreach=True),
    "adagrad": lambda own: torch.optim.Adagrad(own, 0.01, eps=1e-3),
    "rmsprop": lambda own: torch.optim.RMSprop(own, 0.01, eps=1e-2, centered=True),
}


def decay(model: nn.Module) -> Any:
    """Of parameters that no forward changes."""
    return 0.1 * sum(p.sum() for name, p in model.named_parameters() if name.endswith("spare"))


def left_behind(model: nn.Module) -> Any:
    return sum(layer.kept.sum() for layer in model.modules() if isinstance(layer, Odd) and layer.kept is not None)


LOSSES: dict[str, Callable[[nn.Module], Callable[[Tensor, Tensor], Any]]] = {
    "mean": lambda _: lambda y, t: (y - t).square().mean(),
    "sum": lambda _: lambda y, t: (y - t).square().sum(),
    "counted": lambda _: lambda y, t: ((y - t).square().sum(), y.numel()),
    "decay": lambda model: lambda y, t: (y - t).square().mean() + decay(model),
    "dropout": lambda _: lambda y, t: (nn.functional.dropout(y) - t).square().mean(),
    "left behind": lambda model: lambda y, t: (y - t).square().mean() + left_behind(model),
}
WHOLE = ("mean", "sum", "counted", "decay")
"""The losses that a caller may compute of the whole output of ``pipe(x)``."""


def halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


@dataclass(frozen=True)
class Do:
    """Something that is done; printed where a property fails."""

    what: str
    k: int = 0
    flag: bool = False
    rows: int = 1
    loss: str = "mean"
    schedule: str | None = None
    between: str | None = None
    inline: bool = False


STEPS = st.builds(
    Do,
    st.sampled_from(["step", "step", "step", "evaluate"]),
    k=st.integers(0, 9),
    flag=st.booleans(),
    rows=st.integers(1, 7),
    loss=st.sampled_from(sorted(LOSSES)),
    schedule=st.none() | st.sampled_from([*sorted(SCHEDULES), "auto"]),
    between=st.none() | st.sampled_from(["update", "train", "freeze", "hook a layer"]),
    inline=st.booleans(),
)
CHANGES = ("update", "train", "freeze", "hook a layer", "hook a parameter", "chunks", "checkpoint", "copy", "pickle")
CHANGES += ("balance", "resume", "close", "zero", "half the gradients")
DONE = st.builds(Do, st.sampled_from(CHANGES), k=st.integers(0, 9), flag=st.booleans())


@dataclass(frozen=True)
class Combination:
    """A model, a pipe of it, and what is done with both."""

    layers: tuple[str, ...]
    tied: tuple[int, int] | None
    stages: int
    seed: int
    workers: int | None
    """The number of workers; None: one for each stage; 0: in a V."""
    chunks: int
    modes: tuple[str | tuple[bool, ...], ...]
    optimizer: str
    grad: bool
    todo: tuple[Do, ...]

    @property
    def draws(self) -> bool:
        return any(map(draws, self.layers))

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        model = nn.Sequential(*map(make, self.layers))
        owners = [layer for layer in model if isinstance(layer, Odd)]
        if self.tied and owners:
            a, b = (owners[k % len(owners)] for k in self.tied)
            a.linear.weight = b.linear.weight
        return model

    def pipe(self, layers: nn.Sequential) -> GPipe:
        balance = balance_by(self.seed, len(layers), self.stages)
        stages = len(balance)
        places = v_placement(stages) if self.workers == 0 and stages % 2 == 0 else range(stages)
        if self.workers:
            places = [j % self.workers for j in places]
        modes = [self.modes[j % len(self.modes)] for j in range(stages)]
        return GPipe(
            layers,
            balance,
            devices=[f"cpu:{place}" for place in places],
            chunks=self.chunks,
            checkpoint=[
                mode if isinstance(mode, str) else [*(mode * size)[:size]]
                for mode, size in zip(modes, balance, strict=True)
            ],
        )


def one_counts(names: list[str]) -> bool:
    """Whether one layer at most uses the counter outside of all: what partitions leave there for others differs."""
    return sum(name in ("outside", "polite") for name in names) <= 1


modes = st.sampled_from(MODES) | st.lists(st.booleans(), min_size=1, max_size=3).map(tuple)
combinations = st.builds(
    Combination,
    layers=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).filter(one_counts).map(tuple),
    tied=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    workers=st.none() | st.integers(0, 2),
    chunks=st.integers(1, 4),
    modes=st.lists(modes, min_size=1, max_size=3).map(tuple),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    grad=st.booleans(),
    todo=st.lists(STEPS | DONE, min_size=1, max_size=6).map(lambda todo: (Do("step", rows=5), *todo)),
)


class Both:
    """The pipe and the plain model, which all is done with."""

    def __init__(self, case: Combination) -> None:
        self.case, self.plain = case, case.model()
        self.hooks: dict[str, int] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.pipe = case.pipe(copy.deepcopy(self.plain))

    # What is the same afterwards.

    def run(self, do: Do) -> None:
        do = self.possible(do)
        needs_oracle = self.case.draws or do.loss == "dropout"
        earlier = clone(self.plain), self.gradients(self.plain)
        calls, x, y = OUTSIDE["calls"], inputs(do.rows + do.k, do.rows), inputs(99, do.rows)
        try:
            expected = self.seen(self.plain, self.oracle if needs_oracle else self.looped, do, x, y)
        except (*REFUSALS, ZeroDivisionError) as error:
            expected = error
            self.plain = earlier[0]
        later, OUTSIDE["calls"] = OUTSIDE["calls"], calls
        try:
            found = self.seen(self.pipe, self.piped, do, x, y)
        except (*REFUSALS, ZeroDivisionError) as error:
            self.expect_no_harm(error, expected, do, earlier[1])
            found = None
        event(do.what)
        if isinstance(expected, Exception) or found is None:
            OUTSIDE["calls"] = later
            self.begin_anew()
            return
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=1e-7, atol=1e-9, equal_nan=True)
        for own, plain in zip(
            self.pipe, self.plain, strict=True
        ):  # a recomputation whose output is the same may append
            if isinstance(own, Odd):
                own.all = [*plain.all]

    def possible(self, do: Do) -> Do:
        """``do``, where it makes sense, or what is like it."""
        if do.what == "step" and do.schedule is None:
            do = replace(do, loss=do.loss if do.loss in WHOLE else "mean")
            return replace(do, between=None) if self.case.draws else do
        if do.what == "evaluate" and do.loss == "left behind":
            do = replace(do, loss="mean")
        return replace(do, schedule=do.schedule and suited(do.schedule, self.pipe), between=None)

    def seen(self, model: nn.Module, way: Callable[[Do, Tensor, Tensor], Any], do: Do, x: Tensor, y: Tensor) -> Any:
        """All that can be seen after ``way``."""
        HEARD.clear()
        torch.manual_seed(do.k)
        found = way(do, x, y)
        assert torch.is_grad_enabled()
        layers = [layer for layer in model.modules() if isinstance(layer, Odd)]
        attributes = [(layer.kind, layer.value, layer.training) for layer in layers]
        heard = sorted(HEARD)
        other = attributes, [name for name, _ in heard], "outside" in self.case.layers or OUTSIDE["calls"]
        return other, [
            found,
            self.gradients(model),
            dict(model.state_dict()),
            [each for _, each in heard],
            torch.get_rng_state(),
        ]

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    def expect_no_harm(self, error: Exception, expected: Any, do: Do, before: dict[str, Tensor | None]) -> None:
        assert str(error)
        assert isinstance(error, REFUSALS) or type(error) is type(expected)
        assert torch.is_grad_enabled()
        if do.what == "evaluate" or do.schedule is not None:
            now = self.gradients(self.pipe)
            assert all(now[name] is None for name, each in before.items() if each is None)
        event(f"{'both' if isinstance(expected, Exception) else 'refused'}: {str(error)[:70]}")

    def begin_anew(self) -> None:
        """With a pipe of a copy of the model: what a failure has left of the state of layers is open."""
        self.pipe.close()
        state = [each.state_dict() for each in self.optimizers]
        self.plain = clone(self.plain)
        self.pipe = self.case.pipe(clone(self.plain))
        self.renew(state)

    def renew(self, state: list[Any]) -> None:
        """After the parameters are others: optimizers with the state of before, and no gradients and hooks."""
        self.hooks.clear()
        self.optimizers = []
        for model in (self.plain, self.pipe):
            model.zero_grad()
        if state:
            self.optimizers = self.new_optimizers()
            for optimizer, own in zip(self.optimizers, state, strict=True):
                optimizer.load_state_dict(own)

    def new_optimizers(self) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[self.case.optimizer](each.parameters()) for each in (self.plain, self.pipe)]

    # How it is computed.

    def looped(self, do: Do, x: Tensor, y: Tensor) -> Any:
        """By the plain model, one micro-batch after the other."""
        if do.what == "evaluate":
            with torch.no_grad():
                return self.all_forwards(do, x, y)[:2]
        if do.between is None:
            with self.outside_of_grad():
                return self.in_turn(do, x, y)
        trained = {name: p for name, p in self.plain.named_parameters() if p.requires_grad}
        hooked = [p.register_hook(halved) for name, p in trained.items() for _ in range(self.hooks.get(name, 0))]
        loss, output, leaves = self.all_forwards(do, x, y)
        self.change(Do(do.between, do.k, do.flag), self.plain)
        loss.backward()
        for each in hooked:
            each.remove()
        return loss.detach(), output.detach(), gradient_of(leaves)

    def all_forwards(self, do: Do, x: Tensor, y: Tensor) -> Any:
        loss_fn, leaves = LOSSES[do.loss](self.plain), self.leaves(x)
        outputs = [self.plain(leaf * 1) for leaf in leaves]
        found = [loss_fn(output, t) for output, t in zip(outputs, y.chunk(self.pipe.chunks), strict=True)]
        if do.loss == "counted":
            loss = sum(each for each, _ in found) / y.numel()
        elif do.loss == "sum":
            loss = sum(found)
        else:
            loss = sum(each * len(output) for each, output in zip(found, outputs, strict=True)) / len(y)
        return loss, torch.cat(outputs), leaves

    def in_turn(self, do: Do, x: Tensor, y: Tensor) -> Any:
        loss_fn, leaves, outputs = LOSSES[do.loss](self.plain), self.leaves(x), []
        loss, count = torch.zeros((), dtype=DOUBLE), 0
        for leaf, target in zip(leaves, y.chunk(self.pipe.chunks), strict=True):
            output = self.plain(leaf * 1)
            found = loss_fn(output, target)
            each, own = found if isinstance(found, tuple) else (found, 0)
            if do.loss == "counted":
                each = each / (1 if do.schedule else y.numel())
            elif do.loss != "sum":
                each = each * (len(target) / len(y))
            each.backward()
            loss, count = loss + each.detach(), count + own
            outputs.append(output.detach())
        if do.loss == "counted" and do.schedule:  # a step knows the count in the end
            loss = loss / count
            for leaf in (*leaves, *self.plain.parameters()):
                leaf.grad = None if leaf.grad is None else leaf.grad / count
        return loss, torch.cat(outputs), gradient_of(leaves)

    def leaves(self, x: Tensor) -> list[Tensor]:
        return [part.clone().requires_grad_(self.case.grad) for part in x.chunk(self.pipe.chunks)]

    @contextmanager
    def outside_of_grad(self) -> Iterator[None]:
        """Hooks of parameters get the gradient of a whole run."""
        own = dict(self.plain.named_parameters())
        before = {name: p.grad for name, p in own.items()}
        self.plain.zero_grad()
        yield
        for name, p in self.plain.named_parameters():
            if p.grad is not None:
                p.grad *= 0.5 ** self.hooks.get(name, 0)
            if before.get(name) is not None:
                p.grad = before[name] if p.grad is None else before[name] + p.grad

    def oracle(self, do: Do, x: Tensor, y: Tensor) -> Any:
        """By a pipe of one partition: there the masks of dropout are known."""
        options = {"chunks": self.pipe.chunks, "devices": ["cpu"], "checkpoint": "never"}
        with self.outside_of_grad(), closing(GPipe(self.plain, [len(self.plain)], **options)) as pipe:
            return self.called(pipe, replace(do, inline=True, schedule=do.schedule and "1f1b"), x, y)

    def piped(self, do: Do, x: Tensor, y: Tensor) -> Any:
        return self.called(self.pipe, do, x, y)

    def called(self, pipe: GPipe, do: Do, x: Tensor, y: Tensor) -> Any:
        loss_fn, leaf = LOSSES[do.loss](pipe), x.clone().requires_grad_(self.case.grad)
        options: Any = {"loss_fn": loss_fn, "reduction": "sum" if do.loss == "sum" else "mean", "return_outputs": True}
        with running(do.inline):
            if do.what == "evaluate":
                return pipe.evaluate(x, y, **options)
            if do.schedule is not None:
                return (*pipe.step(leaf * 1, y, schedule=do.schedule, **options), leaf.grad)
            output = pipe(leaf * 1)
            found = loss_fn(output, y)
            loss = found[0] / found[1] if isinstance(found, tuple) else found
            if do.between is not None:
                self.change(Do(do.between, do.k, do.flag), pipe)
            loss.backward()
            return loss.detach(), output.detach(), leaf.grad

    # What is done besides.

    def change(self, do: Do, model: nn.Module) -> None:
        """Change the model or the pipe alone."""
        layers = list(model.children())
        layer = layers[do.k % len(layers)]
        parameters = [p for p in layer.parameters() if p.requires_grad]
        if do.what == "train":
            (layer if do.k % 2 else model).train(do.flag)
        elif do.what == "freeze":
            layer.requires_grad_(do.flag)
        elif do.what == "hook a layer":
            layer.register_forward_hook(doubled)
        elif do.what == "hook a parameter" and parameters:
            parameters[0].register_hook(halved)
        elif do.what == "zero":
            model.zero_grad(set_to_none=do.flag)
        elif do.what == "half the gradients" and [*model.parameters()]:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=do.flag)
        elif do.what == "update" and self.optimizers:
            self.optimizers[isinstance(model, GPipe)].step()
            model.zero_grad(set_to_none=do.flag)

    def do(self, do: Do) -> None:
        event(do.what)
        n, state = len(self.plain), [each.state_dict() for each in self.optimizers]
        if do.what == "hook a parameter":
            names = {id(p): name for name, p in self.plain.named_parameters()}  # a tied one has the first name
            own = [names[id(p)] for p in self.plain[do.k % n].parameters() if p.requires_grad]
            for name in own[:1]:
                self.hooks[name] = self.hooks.get(name, 0) + 1
            self.change(do, self.pipe)
        elif do.what == "chunks":
            self.pipe.chunks = 1 + do.k % 5
        elif do.what == "checkpoint":
            self.pipe.checkpoint = MODES[do.k % 3]
        elif do.what == "close":
            self.pipe.close()
        elif do.what in ("copy", "pickle"):
            self.tidy()
            pickles = do.what == "pickle" and "spectral norm" not in self.case.layers
            again = (lambda each: pickle.loads(pickle.dumps(each))) if pickles else copy.deepcopy
            self.pipe.close()
            self.unhook()
            self.pipe, self.plain = again(self.pipe), copy.deepcopy(self.plain)
            self.renew(state)
        elif do.what == "balance":
            self.pipe.close()
            case = replace(self.case, stages=1 + do.k % 4, seed=do.k, chunks=self.pipe.chunks)
            self.pipe = case.pipe(self.pipe[:])
        elif do.what == "resume":
            self.tidy()
            saved, own = self.pipe.state_dict(), self.plain
            self.pipe.close()
            self.plain = clone(self.plain)
            case = replace(self.case, stages=1 + do.k % 4, seed=do.k, chunks=self.pipe.chunks)
            self.pipe = case.pipe(clone(own))
            self.pipe.load_state_dict(saved)
            self.renew(state)
        else:
            if do.what == "update" and not self.optimizers and [*self.plain.parameters()]:
                self.optimizers = self.new_optimizers()
            for model in (self.plain, self.pipe):
                self.change(do, model)

    def tidy(self) -> None:
        for layer in (*self.plain.modules(), *self.pipe.modules()):
            if isinstance(layer, Odd) and detached(layer.kept) is not layer.kept:
                layer.tidy()

    def unhook(self) -> None:
        """Hooks of parameters are not copied, and torch warns of it."""
        for p in self.pipe.parameters():
            p._backward_hooks = None


def clone(model: nn.Sequential) -> nn.Sequential:
    """A copy without tensors that have a graph, which cannot be copied."""
    graphs = [
        layer.kept for layer in model.modules() if isinstance(layer, Odd) and detached(layer.kept) is not layer.kept
    ]
    return copy.deepcopy(model, {id(each): None for each in graphs})


def detached(kept: Any) -> Any:
    return kept.detach() if isinstance(kept, Tensor) and kept.grad_fn is not None else kept


def inputs(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def gradient_of(leaves: list[Tensor]) -> Tensor | None:
    if all(leaf.grad is None for leaf in leaves):
        return None
    return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])


@settings(
    max_examples=settings.default.max_examples * 2,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # an explanation takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(combinations)
def test_any_combination_is_right_or_refused(case: Combination) -> None:
    OUTSIDE["calls"] = 0
    try:
        both = Both(case)
    except REFUSALS as error:
        event(f"not made: {str(error)[:70]}")
        return
    try:
        for do in case.todo:
            both.run(do) if do.what in ("step", "evaluate") else both.do(do)
    finally:
        both.pipe.close()
