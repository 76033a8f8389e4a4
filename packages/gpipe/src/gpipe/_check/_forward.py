"""Examine a model with its own forward: each module that it calls, and the operations between these calls.

The model's forward runs with intercepted module calls. Its own operations are examined as one layer. The input of this
layer is the model's arguments and the modules' outputs; its output is the modules' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import Context as Variables
from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn

from microbatch import Arguments, map_tensors
from profiler.sandbox import copied
from streams import Context

from ..model._blocks import Blocks
from ..model._cache import without_cache
from ..model._called import Answering, answered, answered_by
from ..model._calls import Ended
from ..values._leaves import Activation, as_nonleaf, clone, clone_leaves
from ._findings import Finding
from ._layer import LayerCheck
from ._model import LayerRun, Record, finest, quieten
from ._rows import Cut, Dims, NoRowsError, OtherCallsError
from ._trial import LayerTrial, Signal, Used, attempt, call, seeded


def find_units(model: nn.Module, blocks: Collection[str]) -> Blocks:
    """Return the blocks, and the outermost modules that contain no block, such as embeddings and norms."""
    found: Blocks = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
            if prefix + name in blocks or (is_called and members.isdisjoint(child.modules())):
                if child not in found.values():
                    found[prefix + name] = child
            else:
                visit(f"{prefix}{name}.", child)

    members = {*map(model.get_submodule, blocks)}
    visit("", model)
    return found


def walk_forward(model: nn.Module, names: Collection[str], inputs: Signal) -> tuple[list[LayerRun], Signal, bool]:
    """Run ``model``, and each of its units in isolation.

    Returns:
        The calls of the units, the output, and whether the model's own operations use random numbers in training. If
        they do, the returned run is one with the model in evaluation mode and its units in training mode.
    """
    draws = False
    for is_quiet in (False, True):
        walked, walker = copied(model), _Walker()
        if is_quiet:
            quieten(walked, names)
        with seeded(walked) as used:
            output = Signal(_run(walked, names, inputs, walker), {})
        if not used.drew:
            break
        draws = True
    kept = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in output.tensors()]
    return walker.calls, output.replaced(kept), draws


def examine_forward(
    record: Record, dims: Dims, real: Cut, tolerance: float, *, ends: bool, is_own: bool
) -> tuple[list[Finding], Dims]:
    """Return the findings for the model's own operations and for each unit, and the row dimensions of the output.

    Args:
        dims: the row dimensions of the model's arguments.
        ends: whether the operations after the last block run per micro-batch, and not on the full mini-batch.
        is_own: whether the model computes the loss.
    """
    calls = record.steps
    last = max((k for k, each in enumerate(calls) if each.name in record.blocks), default=len(calls) - 1)
    calls = calls if ends else calls[: last + 1]
    model = copied(record.model)
    if record.draws:
        quieten(model, record.units)
    inputs = record.signal
    cut = finest(inputs, dims, real)
    outputs = _examine_outputs(record, model, calls, dims, cut)
    own = OwnForward(model, record.units, [each.name for each in calls], ends=ends and not is_own)
    signal = Signal((inputs.value, [each.result.output.value for each in calls]), {})
    exam = _exam(own, signal, outputs, dims, cut, real, tolerance) if outputs.is_known else None
    findings = [Finding("random", None, type(model).__name__, "draws random numbers")] if record.draws else []
    arguments = [tensor for each in calls for tensor in each.input.tensors()]
    if exam is None:
        where, values = cut.guess_dims(arguments, dims), [[each.input.value for each in calls]] * len(cut.rows)
    else:
        where, found = exam.examine()
        findings += [_add_call(finding, exam, calls) for finding in exam.findings]
        values = [value[0] for value in found]
    rerun, split = copied(model), copied(model)
    rest = iter(where)
    for k, each in enumerate(calls):
        rows = [next(rest) for _ in each.input.tensors()]
        pieces = cut.signals(each.input, rows)
        parts = [Signal(value[k], {}).replaced(piece.tensors()) for value, piece in zip(values, pieces, strict=True)]
        layer, one, other = (copy.get_submodule(each.name) for copy in (model, rerun, split))
        unit = LayerCheck(*each[:3], layer, one, other, rows, cut, parts, real, tolerance, k > last)
        with each.context.applied():
            unit.examine()
        findings += unit.findings
    ending = [*rest] or cut.guess_dims(record.output.tensors(), dims)
    # A unit may be called several times.
    return [*{(each.code, each.layer): each for each in reversed(findings)}.values()][::-1], ending


def _exam(
    own: OwnForward, signal: Signal, outputs: _Outputs, dims: Dims, cut: Cut, real: Cut, tolerance: float
) -> LayerCheck | None:
    """Return the examination of the model's own operations; None if the units' outputs are not all they need."""
    rerun, split = copied(own), copied(own)
    try:
        result = attempt(copied(own), signal)
    except Exception:  # they may read attributes set by blocks; a pipe raises an error for these
        return None
    known = [*dims, *outputs.dims]
    pieces = [piece.tensors() for piece in cut.signals(signal, known)]
    inputs = signal.value[0]
    parts = [Signal((inputs, v), {}).replaced(p) for v, p in zip(outputs.values, pieces, strict=True)]
    return LayerCheck(None, signal, result, own, rerun, split, known, cut, parts, real, tolerance, own.ends)


def _add_call(finding: Finding, exam: LayerCheck, calls: Sequence[LayerRun]) -> Finding:
    """Add the call whose arguments differ to the evidence of a finding about rows."""
    first = exam.first_differing() if finding.code in ("mixes-rows", "rows") else None
    ends = accumulate(len(each.input.tensors()) for each in calls)
    name = next((each.name for each, end in zip(calls, ends, strict=True) if first is not None and first < end), None)
    return finding if name is None else finding._replace(evidence=f"{finding.evidence}\nin the arguments of {name!r}")


class OwnForward(nn.Module):
    """The model's own operations, as a layer.

    It takes the arguments of the model and the outputs of its units, and returns the arguments of the units' calls.

    Args:
        model: the model.
        units: the names of the units.
        calls: the names of the units in the order of their calls.
        ends: whether to also return the output of the model. Otherwise, the forward ends at the last call.
    """

    def __init__(self, model: nn.Module, units: Collection[str], calls: Sequence[str], *, ends: bool) -> None:
        super().__init__()
        # Only the names: this layer is copied, and must not copy the units of another model.
        self.model, self.units, self.calls, self.ends = model, [*units], calls, ends

    def forward(self, value: tuple[Any, Sequence[Any]]) -> tuple[list[Any], Any]:
        inputs, outputs = value
        known = _Known(self.calls, outputs, ends=self.ends)
        output = None
        with suppress(Ended):
            output = _run(self.model, self.units, Signal(inputs, {}), known, fresh=False)
        return known.arguments, output


class _Known:
    """Answer the calls of units with known outputs."""

    def __init__(self, calls: Sequence[str], outputs: Sequence[Any], *, ends: bool) -> None:
        self.arguments: list[Any] = []
        self._calls, self._outputs, self._ends = calls, outputs, ends

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        k = len(self.arguments)
        if k == len(self._calls) or self._calls[k] != name:
            expected = repr(self._calls[k]) if k < len(self._calls) else "its end"
            raise OtherCallsError(f"the forward calls {name!r}, but on the full mini-batch it reaches {expected}")
        # Cloned, as the model may modify them in place later.
        self.arguments.append(map_tensors(lambda tensor: tensor.clone(), Arguments(args, kwargs)))
        if k + 1 == len(self._calls) and not self._ends:
            raise Ended
        return self._outputs[k]


class _Walker:
    """Run each unit in isolation, on the arguments that the model calls it with.

    Args:
        instead: returns the output to use for a unit that fails, given the index of its call.
    """

    def __init__(self, instead: Callable[[int], Signal] | None = None) -> None:
        self.calls: list[LayerRun] = []
        self._instead = instead

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        signal = Signal(Arguments(args, kwargs), {})
        signal = signal.replaced([*map(clone, signal.tensors())])
        with answered_by(None):
            result = self._attempt(module, signal)
        context = Context.capture()
        context.variables = Variables()  # empty: each examination has its own
        self.calls.append(LayerRun(name, signal, result._replace(roots=(), leaves=()), context))
        return as_nonleaf(clone_leaves(Activation(result.output.value))).value

    def _attempt(self, module: nn.Module, signal: Signal) -> LayerTrial:
        try:
            return attempt(module, signal)
        except Exception:
            if self._instead is None:
                raise
            return LayerTrial(self._instead(len(self.calls)), Used(), (), ())


def _run(model: nn.Module, names: Collection[str], inputs: Signal, answering: Answering, *, fresh: bool = True) -> Any:
    units = {name: model.get_submodule(name) for name in names}
    value = as_nonleaf(clone_leaves(Activation(inputs.value))).value if fresh else inputs.value
    stages = dict.fromkeys(units.values(), 0)
    with answered(units, stages), answered_by(answering), without_cache(model):
        return call(model, value)


class _Outputs(NamedTuple):
    """The outputs of units, in the order of their calls.

    Attributes:
        dims: the row dimensions of their tensors.
        values: the outputs per micro-batch, used for everything in them but the tensors.
        is_known: whether all outputs follow the rows of the model's arguments. Outputs of experts, for example, do not.
    """

    dims: Dims
    values: list[list[Any]]
    is_known: bool


def _examine_outputs(record: Record, model: nn.Module, calls: Sequence[LayerRun], dims: Dims, cut: Cut) -> _Outputs:
    """Determine the row dimensions of each call's outputs from their shapes in forwards of micro-batches."""
    guessed = [cut.guess_dims(each.result.tensors(), dims) for each in calls]
    walks = []
    for k, part in enumerate(cut.signals(record.signal, dims)):
        walked = copied(model)
        walker = _Walker(lambda n, k=k: cut.signals(calls[n].result.output, guessed[n])[k])  # type: ignore[misc]
        with suppress(Exception), seeded(walked):
            _run(walked, record.units, part, walker)
        walks.append(walker.calls)
    found, is_known = _Outputs([], [[] for _ in walks], True), True
    for n, each in enumerate(calls):
        whole, rows = each.result.tensors(), guessed[n]
        values = [each.result.output.value] * len(walks)
        if all(n < len(walk) and walk[n].name == each.name for walk in walks):
            parts = [walk[n].result.output for walk in walks]
            try:
                rows = cut.dims(whole, [part.tensors() for part in parts])
                values = [part.value for part in parts]
            except NoRowsError:
                is_known = False
        found.dims.extend(rows)
        for value, those in zip(values, found.values, strict=True):
            those.append(value)
    return found._replace(is_known=is_known)
