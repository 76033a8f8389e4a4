"""Small faults planted one by one in gpipe's sources, a random sample of them, of which the tests should find each.

    python -m tests.mutation --sample 100 schedule
    python -m tests.mutation --sample 50 --seed 1 engine

mutmut, which does this for blockpartition, runs all faults there are: for an engine with tests of minutes that is days.
Here a fork of a process that has imported torch runs the tests of one part, in a copy of the repository, until one
fails.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = Path("packages/gpipe/src/gpipe")
TESTS = Path("packages/gpipe/tests")
FORKS = multiprocessing.get_context("fork")

PARTS = {
    "schedule": (
        ("schedule",),
        (
            "builders",
            "looped",
            "v_shaped",
            "program",
            "merge",
            "named",
            "validate",
            "choice",
            "schedule",
            "simulate",
        ),
    ),
    "engine": (
        ("engine", "checkpoint", "transport"),
        (
            "between",
            "inline",
            "link",
            "checkpoint",
            "random",
            "autograd",
            "state",
            "step",
            "faults",
            "hooks",
        ),
    ),
}
"""For each part, the folders with its sources, and the tests that should find a fault there, quick ones first."""


class Mutant(NamedTuple):
    """One fault."""

    file: Path
    line: int
    before: str
    after: str
    source: str
    """Of the whole file, with the fault in it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes that might stand in the place of ``node``."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHERS:
            yield _with(node, ops=[OTHERS[type(op)]()])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OTHERS:
            yield _with(node, op=OTHERS[type(op)]())
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=OTHERS[type(op)]())
            yield from values
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(test=test) | ast.If(test=test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield _with(node, func=ast.Name("max" if name == "min" else "min"))
        case ast.Call(func=ast.Name(id="reversed" | "sorted"), args=[first, *_]):
            yield first


def mutants(file: Path) -> list[Mutant]:
    """All faults for a file, in order."""
    tree = ast.parse((ROOT / file).read_text())
    found = []
    for parent, field, index, node in list(_places(tree)):
        for variant in variants(node):
            _put(parent, field, index, ast.fix_missing_locations(ast.copy_location(copy.deepcopy(variant), node)))
            found.append(Mutant(file, node.lineno, _line(node), _line(variant), ast.unparse(tree)))
            _put(parent, field, index, node)
    return found


def _places(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, Any]]:
    """Every statement and expression that does something, and where it stands."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST) and not _says_nothing(node):
                if isinstance(node, (ast.expr, ast.stmt)):
                    yield parent, field, index, node
                yield from _places(node)


def _says_nothing(node: ast.AST) -> bool:
    """Whether a node is about words and types: messages, logs, docstrings, imports, assertions of what must be so."""
    match node:
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__" | "_log")]):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))):
            return True
        case ast.keyword(arg="strict"):  # of zip: an assertion
            return True
        case ast.FunctionDef(name="__repr__" | "__str__" | "__format__"):
            return True
    return False


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0].strip()


class Laboratory:
    """A copy of the repository in which tests run."""

    def __init__(self, folder: Path, tests: list[str]) -> None:
        self._folder = folder
        self._tests = tests
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ("packages", "conftest.py", "pyproject.toml", "README.md"):
            (shutil.copy if (ROOT / name).is_file() else _copy(ignored))(ROOT / name, folder / name)

    def finds(self, mutant: Mutant | None, seconds: float) -> bool:
        """Whether a test fails, or does not come to an end in time."""
        if mutant is None:
            return self._fail(seconds, quiet=False)
        file = self._folder / mutant.file
        original = file.read_text()
        file.write_text(mutant.source)
        try:
            return self._fail(seconds, quiet=True)
        finally:
            file.write_text(original)

    def _fail(self, seconds: float, *, quiet: bool) -> bool:
        child = FORKS.Process(target=self._work, args=(quiet,))
        child.start()
        child.join(seconds)
        if child.is_alive():
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
        return child.exitcode != 0

    def _work(self, quiet: bool) -> None:
        """The life of a child: a group of its own, with what the tests start; it waits for none of their threads."""
        os.setsid()
        os._exit(self._run(quiet))

    def _run(self, quiet: bool) -> int:
        import pytest

        os.chdir(self._folder)
        if quiet:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        sources = [str(self._folder / "packages" / each.name / "src") for each in (ROOT / "packages").iterdir()]
        sys.path[:0] = [str(self._folder), *sources]
        return int(pytest.main(["-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", *self._tests]))


def _copy(ignored: Any) -> Any:
    return lambda source, target: shutil.copytree(source, target, ignore=ignored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--sample", type=int, default=100, help="how many faults of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.0, help="exit with 1 if fewer per cent are found")
    options = parser.parse_args()
    scores = [measure(part, options.sample, options.seed) for part in options.parts]
    sys.exit(min(scores) < options.least)


def measure(part: str, sample: int, seed: int) -> float:
    """The percentage of faults in a part that its tests find; the others are printed."""
    folders, names = PARTS[part]
    files = sorted(file.relative_to(ROOT) for name in folders for file in (ROOT / SOURCE / name).glob("*.py"))
    every = [mutant for file in files for mutant in mutants(file)]
    chosen = sorted(random.Random(seed).sample(every, min(sample, len(every))))
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder), [str(TESTS / f"test_{name}.py") for name in names])
        begin = time.monotonic()
        if laboratory.finds(None, 1800):
            sys.exit(f"the tests of {part} fail without any fault")
        whole = time.monotonic() - begin
        print(f"{part}: {len(chosen)} of {len(every)} faults; the tests take {whole:.0f} s", flush=True)
        survivors = []
        for mutant in chosen:
            if not laboratory.finds(mutant, 3 * whole + 5):
                survivors.append(mutant)
                print(f"  not found: {mutant}", flush=True)
    score = 100 * (1 - len(survivors) / max(1, len(chosen)))
    print(f"{part}: {score:.0f} % found, in {time.monotonic() - begin:.0f} s", flush=True)
    return score


if __name__ == "__main__":
    os.environ["CI"] = "1"  # the same examples each time
    sys.dont_write_bytecode = True  # two faults of one second would look like the same file
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import torch  # noqa: F401

    main()
