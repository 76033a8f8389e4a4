"""How far a call travels in the engine, in counts that are the same on every machine, and where its time goes.

Counted on two stages of one small linear layer each, four micro-batches, nothing checkpointed. Beside ours stands
torchgpipe where it is installed; it has no way to run inline, so its calls are those of all its threads.
"""

from __future__ import annotations

import argparse
import ast
import cProfile
import importlib
import pkgutil
import pstats
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import gpipe

from .engine import empty_pipe, one_row_each
from .measure import installed
from .report import Report, Table

OURS = ("gpipe", "profiler", "blockpartition", "microbatch", "streams")
STAGES, MICROBATCHES = 2, 4
PROFILED_STAGES, PROFILED_MICROBATCHES, TOP = 4, 64, 25


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Counts of ours and of torchgpipe, then the functions that take most time."""
    yield _counts()
    runs = options.rounds or (2 if options.quick else 20)
    yield Report([_hotspots(_profiled(runs, checkpoint), runs, checkpoint) for checkpoint in ("never", "always")])


def _counts() -> Report:
    caption = f"{STAGES} stages, {MICROBATCHES} micro-batches, checkpoint never; a forward and a backward"
    ours, theirs = count_ours(), count_torchgpipe() if installed("torchgpipe") else {}
    table = Table("engine.md", "calls", caption, ("what", "gpipe", "torchgpipe"))
    for name, number in ours.items():
        table.add(name, f"{number:g}", f"{theirs[name]:g}" if theirs else "–")
    return Report([table], {f"calls: {name}": number for name, number in ours.items()})


def count_ours() -> dict[str, float]:
    """The counts of gpipe and the packages below it; calls are counted inline."""
    layers = [FrameCounter(OURS) for _ in range(STAGES)]
    pipe = gpipe.GPipe(
        nn.Sequential(*layers), [1] * STAGES, devices=["cpu"] * STAGES, chunks=MICROBATCHES, checkpoint="never"
    )
    _step(pipe)
    frames = max(layer.frames for layer in layers)
    with gpipe.inline():
        _step(pipe)
        trace = Trace.of(lambda: _step(pipe), OURS)
    pipe.close()
    return _described(frames, trace, gpipe)


def count_torchgpipe() -> dict[str, float]:
    """The same of torchgpipe, on all its threads."""
    import torchgpipe

    layers = [FrameCounter(("torchgpipe",)) for _ in range(STAGES)]
    pipe = torchgpipe.GPipe(
        nn.Sequential(*layers), [1] * STAGES, devices=["cpu"] * STAGES, chunks=MICROBATCHES, checkpoint="never"
    )
    _step(pipe)
    return _described(max(layer.frames for layer in layers), Trace.of(lambda: _step(pipe), ("torchgpipe",)), torchgpipe)


def _step(pipe: nn.Module) -> None:
    pipe(torch.ones(MICROBATCHES, 3, requires_grad=True)).sum().backward()


def _described(frames: int, trace: Trace, package: ModuleType) -> dict[str, float]:
    cells = STAGES * MICROBATCHES
    return {
        "frames above a layer": frames,
        "modules entered": len(trace.modules),
        "calls a cell": trace.calls / cells,
        "switches a cell": trace.switches / cells,
        "thread-local objects": len(thread_local_objects(package)),
        "import cycles": len(import_cycles(package)),
    }


# Since Python 3.12 these are no calls any more, and the counts are those of every version.
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


class FrameCounter(nn.Linear):
    """A layer that counts the frames of some packages from which it is called."""

    frames = 0

    def __init__(self, packages: tuple[str, ...]) -> None:
        super().__init__(3, 3)
        self._packages = packages

    def forward(self, x: Tensor) -> Tensor:
        self.frames = sum(_is_of(frame, self._packages) for frame in _callers(sys._getframe()))
        return super().forward(x)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of(frame: FrameType, packages: tuple[str, ...]) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


@dataclass
class Trace:
    """The modules of the functions that were called, in order, on each thread."""

    threads: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, work: Callable[[], object], packages: tuple[str, ...]) -> Trace:
        """Trace the functions of `packages` on this thread and on those that `work` starts."""
        trace = cls()

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and _is_of(frame, packages) and frame.f_code.co_name not in _COMPREHENSIONS:
                trace.threads[threading.get_ident()].append(frame.f_globals["__name__"])

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return trace

    @property
    def modules(self) -> set[str]:
        return {module for modules in self.threads.values() for module in modules}

    @property
    def calls(self) -> int:
        return sum(map(len, self.threads.values()))

    @property
    def switches(self) -> int:
        """How often a function was called whose module is not that of the one called before."""
        return sum(a != b for modules in self.threads.values() for a, b in pairwise(modules))


def thread_local_objects(package: ModuleType) -> list[str]:
    """Where the package's source makes an object of which each thread, or each context, has its own value."""
    return [
        f"{module.__name__}:{node.lineno}"
        for module in _modules(package)
        for node in ast.walk(_source(module))
        if isinstance(node, ast.Call) and _is_thread_local(_value(node.func, module))
    ]


def _is_thread_local(made: object) -> bool:
    return isinstance(made, type) and issubclass(made, (threading.local, ContextVar))


def _value(expression: ast.expr, module: ModuleType) -> object:
    """What a name, or an attribute of a name, stands for in `module`; None if it is local to a function."""
    if isinstance(expression, ast.Name):
        return vars(module).get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, module), expression.attr, None)
    # ContextVar[int](...) is ContextVar(...).
    return _value(expression.value, module) if isinstance(expression, ast.Subscript) else None


def _source(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


def _modules(package: ModuleType) -> list[ModuleType]:
    names = [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [package, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]


def import_cycles(package: ModuleType) -> list[set[str]]:
    """Groups of modules that import each other, imports inside of functions included; not those for types alone."""
    modules = _modules(package)
    known = {module.__name__ for module in modules}
    return cycles({module.__name__: _imports(module, known) for module in modules})


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components with more than one node."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return [set(group) for group in groups if len(group) > 1]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def _imports(module: ModuleType, known: set[str]) -> set[str]:
    """Which of the `known` modules the source of `module` imports."""
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    found = {target for node in _run(_source(module)) for target in _targets(node, package, known)}
    return found - {module.__name__}


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without what only type checkers see."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = iter(node.orelse)
    for child in children:
        yield from _run(child)


def _targets(node: ast.AST, package: str, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        base = ".".join(part for part in (above, node.module) if part)
        for alias in node.names:
            # `from . import x` is of the module x, or else of a name in `.` itself.
            target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
            if target in known:
                yield target


def _profiled(runs: int, checkpoint: str) -> pstats.Stats:
    pipe = empty_pipe(PROFILED_STAGES, PROFILED_MICROBATCHES, checkpoint)
    rows, ones = one_row_each(PROFILED_MICROBATCHES), torch.ones(PROFILED_MICROBATCHES, 1)
    profile = cProfile.Profile()
    with gpipe.inline():
        pipe(rows).backward(ones)
        for _ in range(runs):
            profile.enable()
            pipe(rows).backward(ones)
            profile.disable()
    return pstats.Stats(profile)


def _hotspots(stats: pstats.Stats, runs: int, checkpoint: str) -> Table:
    entries = stats.stats  # type: ignore[attr-defined]
    cells = runs * PROFILED_STAGES * PROFILED_MICROBATCHES
    whole = sum(own for _, _, own, _, _ in entries.values())
    caption = (
        f"{PROFILED_STAGES} stages, {PROFILED_MICROBATCHES} micro-batches, inline, checkpoint {checkpoint}, {runs} "
        f"runs under cProfile: {whole / cells * 1e6:.1f} µs a cell; the {TOP} functions that take most of it themselves"
    )
    table = Table("engine.md", f"hotspots-{checkpoint}", caption, ("function", "calls a cell", "µs a cell", "share"))
    for where, (_, calls, own, _, _) in sorted(entries.items(), key=lambda entry: -entry[1][2])[:TOP]:
        table.add(_name(where), f"{calls / cells:.2f}", f"{own / cells * 1e6:.2f}", f"{own / whole:.1%}")
    return table


def _name(where: tuple[str, int, str]) -> str:
    """The file as in the package, without where it is installed."""
    file, line, function = where
    if file == "~":
        return f"`{function}`"
    path = Path(file)
    return f"`{path.parent.name}/{path.name}:{line} {function}`"
