"""Random cases: a model, how it is cut, what it is fed, and how it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from packages.gpipe.tests.layers import DOUBLE
from packages.gpipe.tests.schedules import ALONE, CHOICES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .kinds import BY_MICROBATCH, KINDS, STRUCTURE, fresh, hooked
from .layers import Named, On
from .losses import LOSSES, Head, LossKind
from .sites import Site, Tally
from .values import WIDTH, floats

MODES = ("never", "except_last", "always")


class Part(NamedTuple):
    """A kind of layer, which leaf it is for, and which variant."""

    kind: str
    pick: int
    option: int


class Built(NamedTuple):
    """A case come to life.

    Attributes:
        enter: what the caller does with the rows before the model gets them.
        tally: what hooks of the model have counted.
    """

    enter: nn.Sequential
    model: nn.Sequential
    head: Head
    tally: Tally

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        parts = {"enter": self.enter, "model": self.model, "head": self.head}
        return {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}


@dataclass(frozen=True)
class Case:
    """Printed where a property fails; :meth:`build` gives the same model each time.

    Attributes:
        enter: layers before the pipe.
        cuts: where stages begin, whatever the number of layers.
        ties: whether linear layers of a stage have one weight, where they can.
        rows: for each run.
        prefilled: whether some parameters have a gradient already.
        together: whether all forwards come before all backwards.
        optimizes: whether parameters change between runs.
        schedule: a name, or numbers that choose one (:func:`some_schedule`).
        workers: on how many the stages are; None for one each.
    """

    enter: tuple[Part, ...]
    layers: tuple[Part, ...]
    cuts: tuple[int, ...]
    ties: bool
    rows: tuple[int, ...]
    chunks: int
    checkpoint: str
    training: bool
    needs_grad: bool
    prefilled: bool
    together: bool
    optimizes: bool
    loss: str
    schedule: str | tuple[int, ...]
    workers: int | None
    inline: bool
    seed: int

    @property
    def by_row(self) -> bool:
        """Whether the micro-batches make no difference."""
        return not any(part.kind in BY_MICROBATCH for part in self.layers)

    @property
    def stops(self) -> bool:
        """Whether a function returns None as the gradient of its input."""
        return any("stops" in part.kind for part in self.layers)

    @property
    def in_order(self) -> bool:
        """Whether it matters which micro-batch comes first."""
        return any(part.kind == "learns" for part in self.layers)

    @property
    def kind(self) -> LossKind:
        return LOSSES[self.loss]

    def build(self) -> Built:
        torch.manual_seed(self.seed)
        tally = Tally()
        sample = torch.rand(2, WIDTH, dtype=DOUBLE) + 0.1
        enter, value = _sequence(self.enter, sample, tally)
        model, value = _sequence(self.layers, value, tally)
        if self.kind.in_place and floats(value):
            model.append(On(floats(value)[0], Named("fresh", fresh)))
        built = Built(enter, model.train(self.training), Head(self.kind.compute), tally)
        if self.ties:
            _tie([model[start:stop] for start, stop in self._spans(len(model))])
        if self.prefilled:
            _prefill(list(built.parameters.values())[::2])
        tally.counts.clear()
        return built

    def balance(self, layers: int) -> list[int]:
        return [stop - start for start, stop in self._spans(layers)]

    def placement(self, stages: int) -> list[int]:
        """The worker of each stage."""
        workers = stages if self.workers is None or stages % self.workers else self.workers
        return [j % workers for j in range(stages)]

    def _spans(self, layers: int) -> list[tuple[int, int]]:
        cuts = sorted({1 + cut % (layers - 1) for cut in self.cuts}) if layers > 1 else []
        return list(zip([0, *cuts], [*cuts, layers], strict=True))

    def inputs(self, run: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + run)
        x = torch.randn(self.rows[run], WIDTH, generator=generator, dtype=DOUBLE)
        return x.requires_grad_(self.needs_grad)

    def targets(self, run: int) -> Tensor:
        """What each row counts; a few count nothing where rows are counted."""
        return torch.linspace(1, 0.2, self.rows[run], dtype=DOUBLE)


def _sequence(parts: Sequence[Part], value: Any, tally: Tally) -> tuple[nn.Sequential, Any]:
    """Layers, each made for what those before it give, and what the last one gives."""
    layers, open_ = nn.Sequential(), []
    for k, part in enumerate(parts):
        made = KINDS[part.kind](Site(value, part.pick, part.option, f"{k} {part.kind}", tally, open_))
        value = _appended(layers, made, value)
    while open_:
        value = _appended(layers, KINDS["pop"](Site(value, 0, 1, "pop", tally, open_)), value)
    return layers if layers else nn.Sequential(nn.Identity()), value


@torch.no_grad()
def _appended(layers: nn.Sequential, made: nn.Module | list[nn.Module] | None, value: Any) -> Any:
    for layer in made if isinstance(made, list) else [made] if made is not None else []:
        layers.append(layer)
        value = layer(pytree.tree_map_only(Tensor, Tensor.clone, value))
    return value


def _tie(stages: Sequence[nn.Sequential]) -> None:
    for stage in stages:
        first: dict[tuple[torch.Size, torch.dtype], nn.Linear] = {}
        for linear in (module for module in stage.modules() if isinstance(module, nn.Linear)):
            like = first.setdefault((linear.weight.shape, linear.weight.dtype), linear)
            if not hooked(linear.weight) and not hooked(like.weight):
                linear.weight = like.weight


def _prefill(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.25)


def parts(kinds: Sequence[str]) -> st.SearchStrategy[Part]:
    return st.builds(Part, st.sampled_from(kinds), st.integers(0, 5), st.integers(0, 15))


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        enter=st.lists(parts([*STRUCTURE, "scale"]), max_size=2).map(tuple),
        layers=st.lists(parts(list(KINDS)), min_size=1, max_size=6).map(tuple),
        cuts=st.lists(st.integers(0, 4), min_size=1, max_size=2).map(tuple),
        ties=st.booleans(),
        rows=st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple),
        chunks=st.integers(1, 5),
        checkpoint=st.sampled_from(MODES),
        training=st.sampled_from([True, True, True, False]),
        needs_grad=st.sampled_from([True, True, True, False]),
        prefilled=st.booleans(),
        together=st.booleans(),
        optimizes=st.booleans(),
        loss=st.sampled_from(list(LOSSES)),
        schedule=st.sampled_from([*ALONE] * 3) | CHOICES,
        workers=st.sampled_from([None, None, 1, 2]),
        inline=st.booleans(),
        seed=st.integers(0, 1000),
    ).map(_trainable)


def _trainable(case: Case) -> Case:
    """With a parameter at the beginning if nothing else may require grad."""
    return case if case.needs_grad else replace(case, layers=(Part("scale", 0, 0), *case.layers))
