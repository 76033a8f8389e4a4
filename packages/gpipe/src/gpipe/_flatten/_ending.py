"""The output of a model that computes its own loss, from what its modules returned for each micro-batch.

A loss may be a mean over a part of the mini-batch, such as all tokens without padding. So a pipe concatenates what the
modules next to the loss returned, and runs the model's own ``forward`` once more with these values in place of the
modules. It then computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from microbatch import map_tensors

from ._calls import WITH_SAMPLE, Called, Key, Like, Observed, is_as_then
from ._inputs import Inputs
from ._placeholders import unknown
from ._skeleton import skeleton
from ._standins import ShapesByName, StandIn, Tape
from ._tree import MISSING
from ._trunk import outermost

if TYPE_CHECKING:
    from ._segment import Segment

Returned = dict[Key, Tensor]
"""The tensors that modules next to the loss returned; of the last block under :data:`BLOCK`."""

BLOCK = "the last block"


@dataclass
class Recording:
    """A call of a pipe that returns the whole output of its model.

    Attributes:
        shapes: what modules of earlier segments returned for a micro-batch. What does not follow the rows, as a
            position for each token, has these sizes for all rows too.
    """

    ending: Ending
    shapes: ShapesByName = field(default_factory=dict)


class Ending:
    """The end of a model's forward, without the modules next to the loss.

    Args:
        calls: what these modules returned for the sample, by name.
        places: the tensors that the last block returned, if that is next to the loss.
        rows: of the sample.

    Attributes:
        follows: the tensors that have twice as many rows for twice as many inputs, so that those of micro-batches can
            be concatenated; None before this was tried.
        tried: what modules of earlier segments returned for the sample, and for the sample twice.
        fields: the fields of the output that it can compute.
        missing: the others.
    """

    def __init__(self, calls: Mapping[str, list[Observed]], places: Collection[int], rows: int) -> None:
        self.calls, self._places, self._rows = calls, places, rows
        self.follows: frozenset[Key] | None = None
        self.tried: tuple[ShapesByName, ShapesByName] = {}, {}
        self.fields: frozenset[str] = frozenset()
        self.missing: list[str] = []

    def recorded(self, segment: Segment, tape: Tape) -> Returned:
        for name in self.calls:
            module = segment.net.get_submodule(name)
            if module._backward_hooks or module._backward_pre_hooks:  # which look at what no forward hook sees
                raise RuntimeError(
                    f"{name!r} has backward hooks, and the loss of all rows is computed from what it returns; put "
                    "them on the modules inside, or give step() a loss_fn"
                )
        if not tape.foreseen:
            raise RuntimeError(
                "the forward asks for the sizes of what blocks return, and the loss of all rows would be computed with "
                "those of the sample, which are others; give step() a loss_fn, or make a new pipe with a sample of "
                "this size"
            )
        found: Returned = {(BLOCK, 0, m): tape.done[m] for m in self._places}
        for name, calls in tape.returned.items():
            for number, (leaves, tree) in enumerate(calls):
                known = self.calls[name][number] if number < len(self.calls[name]) else None
                # A list may have an entry for each picture; a loss that needs one that is missing is refused.
                now = [] if known is None else leaves if tree == known.result else tree.moved(leaves, known.result)
                if known is None or not all(
                    is_as_then(leaf, then) or (leaf is MISSING and isinstance(then, Like))
                    for leaf, then in zip(now, known.outputs, strict=True)
                ):
                    raise RuntimeError(
                        f"{name!r} was called more often, or returned another structure, than {WITH_SAMPLE}"
                    )
                found.update({(name, number, m): leaf for m, leaf in enumerate(now) if isinstance(leaf, Tensor)})
        # What follows no rows, as a position bias, is left out: a loss that needs it is refused on the sample.
        return found if self.follows is None else {key: found[key] for key in found if key in self.follows}

    def net(self, segment: Segment) -> nn.Module:
        modules = {name: segment.net.get_submodule(name) for name in self.calls}
        replaced = {module: StandIn(module, name, self.calls[name]) for name, module in modules.items()}
        return skeleton(segment.net, replaced, lambda tensor: True, {})

    def __call__(
        self,
        segment: Segment,
        inputs: Inputs,
        found: Returned,
        shapes: ShapesByName | None = None,
        net: nn.Module | None = None,
        local: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """What the model returns for ``inputs`` where its modules return what was ``found``, for all rows.

        The loss is on the device of the inputs, where trainers add losses up.

        Args:
            shapes: what modules of earlier segments returned for some rows; by default that is taken from the sample.
            net, local: a copy of :meth:`net`, and what makes a parameter of one of its modules like those of the copy.
        """
        device = next(iter(found.values())).device
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), tuple(inputs))
        as_tuple = kwargs.get("return_dict") is False
        if as_tuple:  # which does not tell the names of its fields
            kwargs = {**kwargs, "return_dict": True}
        done = [found.get((BLOCK, 0, m), unknown(leaf, device)) for m, leaf in enumerate(segment.done)]
        known = self._of_all_rows(shapes or {}, inputs.rows())
        tape = Tape(device, known, segment.first, [], done, found, {}, inputs.tensors(), ())
        tape.local = local or (lambda tensor: tensor.to(device))
        output = segment.run(tape, Inputs(args, kwargs), self.net(segment) if net is None else net)
        home = inputs.tensors()[0].device
        if isinstance(output, Tensor):
            return output.to(home)
        if not isinstance(output, Mapping):
            return output  # a tuple or a dataclass has all its fields, or cannot be made
        fields = {name: value for name, value in output.items() if name in self.fields}
        if isinstance(fields.get("loss"), Tensor):
            fields["loss"] = fields["loss"].to(home)
        whole: Any = type(output)(**fields)
        return whole.to_tuple() if as_tuple else whole

    def _of_all_rows(self, shapes: ShapesByName, rows: int) -> ShapesByName:
        """``shapes``, of a micro-batch, with the sizes for so many ``rows`` where these follow the rows."""
        one, two = self.tried
        names = shapes.keys() & one.keys() & two.keys()
        calls = {name: zip(shapes[name], one[name], two[name], strict=False) for name in names}
        times = rows / max(1, self._rows)
        return {name: tuple(_sized_call(times, *call) for call in each) for name, each in calls.items()}


def _sized_call(times: float, now: Sequence[Any], one: Sequence[Any], two: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes of what a call returned; those of the sample for a list, which may have an entry for each picture."""
    alike = len(now) == len(one) == len(two)
    return tuple(map(partial(_sized, times), now, one, two)) if alike else tuple(one)


def _sized(times: float, now: Any, one: Any, two: Any) -> Any:
    """``now``, with ``times`` the size of ``one`` where ``two``, which has twice the rows, is larger."""
    if not all(isinstance(each, Like) for each in (now, one, two)):
        return now
    sizes = zip(now.shape, one.shape, two.shape, strict=False)
    return Like(torch.Size([size if a == b else round(a * times) for size, a, b in sizes]), now.dtype)


def ending_of(model: nn.Module, inputs: Inputs, called: Called, blocks: Sequence[nn.Module]) -> Ending:
    """How ``model`` computes its loss, by what all its modules returned for ``inputs``."""
    calls: dict[nn.Module, list[Observed]] = {}
    for module, call in called:
        calls.setdefault(module, []).append(call)
    rows = inputs.rows()

    def is_of_rows(module: nn.Module) -> bool:
        return module in calls and all(_has_rows(call.outputs, rows) for call in calls[module])

    # The largest modules but blocks that return values for rows, and no loss; the rest of the forward is the loss.
    found = {name: calls[module] for name, module in outermost(model, is_of_rows, skips=blocks.__contains__)}
    if any(blocks[-1] in model.get_submodule(name).modules() for name in found):
        return Ending(found, (), rows)
    return Ending(found, [m for m, leaf in enumerate(calls[blocks[-1]][-1].outputs) if isinstance(leaf, Like)], rows)


def _has_rows(outputs: Sequence[Any], rows: int) -> bool:
    shapes = [leaf.shape for leaf in outputs if isinstance(leaf, Like)]
    return bool(shapes) and shapes[0][:1] == (rows,) and all(shapes)
