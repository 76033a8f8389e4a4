"""Mutation testing: plants a random sample of small faults in the sources, one at a time. Tests should find each.

    python -m tests.mutation --sample 30                # in all packages together
    python -m tests.mutation --sample 50 blockpartition
    python -m tests.mutation --sample 50 --seed 1 gpipe/engine gpipe/checkpoint
    python -m tests.mutation --lines 'wait_|record_' --tests 'tests/simulated -k "not fault"' gpipe streams

Testing all faults of the engine would take days. A fork of a process that has imported torch runs the closest tests,
in a copy of the repository, until one fails. That test has to pass without the fault.
"""

import argparse
import ast
import copy
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("blockpartition", "microbatch", "streams", "profiler", "gpipe")
FORKS = multiprocessing.get_context("fork")
HANGS = 600
"""Timeout in seconds: a slower test counts as hanging."""


Place = tuple[ast.AST, str, int | None, Any]
"""A node, with its parent, the field, and the index there if that is a list."""


class Mutant(NamedTuple):
    """One fault."""

    file: Path
    line: int
    before: str
    after: str
    source: str
    """The source of the whole file, including the fault."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip

ENDS = {"source": "target", "compute": "copy", "values_out": "gradients_out", "values_in": "gradients_in"}
STREAMS = {**ENDS, **{there: here for here, there in ENDS.items()}}
"""Names of streams, and of objects with streams, that can be swapped."""


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield possible replacements of ``node``."""
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
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield _with(node, func=ast.Name("max" if name == "min" else "min"))
        case ast.Call(func=ast.Name(id="reversed" | "sorted"), args=[first, *_]):
            yield first
        case ast.Call(func=ast.Name(id="wait_stream"), args=[first, second]):
            yield _with(node, args=[second, first])
        case ast.With(body=body):
            yield ast.If(ast.Constant(True), body, [])
        case ast.Name(id=name) if name in STREAMS:
            yield ast.Name(STREAMS[name])
        case ast.Attribute(attr=name) if name in STREAMS:
            yield _with(node, attr=STREAMS[name])


def mutants(file: Path, lines: str = "") -> list[Callable[[], Mutant]]:
    """Return functions that create the faults of a file, in order, for lines matching the pattern ``lines``."""
    source = (ROOT / file).read_text()
    tree = ast.parse(source)
    wanted = {number for number, line in enumerate(source.splitlines(), start=1) if re.search(lines, line)}
    places = [place for place in _places(tree) if place[-1].lineno in wanted]
    return [partial(_made, file, tree, place, variant) for place in places for variant in variants(place[-1])]


def _made(file: Path, tree: ast.AST, place: Place, variant: ast.AST) -> Mutant:
    parent, field, index, node = place
    _put(parent, field, index, ast.fix_missing_locations(ast.copy_location(copy.deepcopy(variant), node)))
    source = ast.unparse(tree)
    _put(parent, field, index, node)
    return Mutant(file, node.lineno, _line(node), _line(variant), source)


def _places(parent: ast.AST) -> Iterator[Place]:
    """Yield every statement and expression that affects behavior, with its parents."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST) and not _says_nothing(node):
                if isinstance(node, (ast.expr, ast.stmt)):
                    yield parent, field, index, node
                yield from _places(node)


def _says_nothing(node: ast.AST) -> bool:
    """Return whether a node does not affect behavior: messages, logs, docstrings, imports, assertions, types."""
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


def _line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0].strip()


def sources(part: str) -> list[Path]:
    """The files of a package, or of a folder in it, such as ``gpipe/engine``."""
    package = part.split("/")[0]
    folder = ROOT / "packages" / package / "src" / part
    if not folder.is_dir():
        sys.exit(f"there is no folder {folder.relative_to(ROOT)}; expected a package, or one of its folders")
    return sorted(path.relative_to(ROOT) for path in folder.rglob("*.py"))


def nearest_tests(file: Path) -> tuple[str, ...]:
    """Tests that should find a fault in ``file``, the likeliest first: of its name, of its folder, and of no folder."""
    _, package, _, _, *inside = file.parts
    folder = ROOT / "packages" / package / "tests"
    own = folder / (inside[0].lstrip("_") if len(inside) > 1 else "")
    others = [*sorted(own.rglob("test_*.py") if own != folder else ()), *sorted(folder.glob("test_*.py"))]
    others.sort(key=lambda path: path.stem != f"test_{file.stem.lstrip('_')}")
    return tuple(str(path.relative_to(ROOT)) for path in others)


class Laboratory:
    """A copy of the repository in which tests run."""

    def __init__(self, folder: Path, tests: tuple[str, ...]) -> None:
        self._folder = folder
        self._tests = tests
        copied = partial(shutil.copytree, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        for name in ("packages", "tests", "docs", "conftest.py", "pyproject.toml", "README.md"):
            (shutil.copy if (ROOT / name).is_file() else copied)(ROOT / name, folder / name)

    def finds(self, mutant: Mutant) -> str | None:
        """The test that fails, or hangs, with the fault and passes without it."""
        file = self._folder / mutant.file
        original = file.read_text()
        file.write_text(mutant.source)
        try:
            found = self._failing(self._tests or nearest_tests(mutant.file))
        finally:
            file.write_text(original)
        if found and self._failing((found,)):
            sys.exit(f"{found} fails without any fault")
        return found

    def _failing(self, tests: tuple[str, ...]) -> str | None:
        """Return the first failing test; if the process dies, the last one that ran."""
        hear, tell = FORKS.Pipe(duplex=False)
        child = FORKS.Process(target=self._work, args=(tests, tell))
        child.start()
        tell.close()
        test = tests[0]
        with suppress(EOFError):
            while hear.poll(2 * HANGS):
                test = hear.recv()
            os.killpg(child.pid, signal.SIGKILL)  # it hangs where no time limit of a test reaches it
        child.join()
        return test if child.exitcode else None

    def _work(self, tests: tuple[str, ...], tell: Connection) -> None:
        """Run tests in a child, in a process group with everything they start. Do not wait for their threads."""
        os.setsid()
        os._exit(self._run(tests, tell))

    def _run(self, tests: tuple[str, ...], tell: Connection) -> int:
        import pytest

        os.chdir(self._folder)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        sys.path[:0] = paths = [str(self._folder), *[f"{self._folder}/packages/{name}/src" for name in PACKAGES]]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of processes that tests start
        del sys.modules["tests"]  # the one of the repository
        options = ["-x", "-q", "--tb=line", "--assert=plain", f"--timeout={HANGS}", "-p", "no:cacheprovider"]
        teller = SimpleNamespace(pytest_runtest_logstart=lambda nodeid: tell.send(nodeid))
        return int(pytest.main([*options, *tests], plugins=[teller]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PACKAGES, help="packages, or folders such as gpipe/engine")
    parser.add_argument("--sample", type=int, default=30, help="how many faults in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", default="", help="a pattern that is found in the lines with faults")
    parser.add_argument("--tests", default="", help="arguments of pytest, instead of the nearest tests")
    parser.add_argument("--least", type=float, default=0.0, help="exit with 1 if fewer per cent are found")
    options = parser.parse_args()
    every = [make for part in options.parts for file in sources(part) for make in mutants(file, options.lines)]
    sample = sorted(make() for make in random.Random(options.seed).sample(every, min(options.sample, len(every))))
    print(f"{len(sample)} of {len(every)} faults", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder), tuple(shlex.split(options.tests)))
        found = [_told(mutant, laboratory.finds(mutant)) for mutant in sample]
    score = 100 * sum(found) / max(1, len(found))
    print(f"{sum(found)} of {len(found)} found, {score:.0f} %", flush=True)
    sys.exit(score < options.least)


def _told(mutant: Mutant, test: str | None) -> bool:
    print(f"{mutant}\n    {f'found by {test}' if test else 'NOT FOUND'}", flush=True)
    return test is not None


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # as in conftest.py
    sys.dont_write_bytecode = True  # two faults of one second would look like the same file
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import torch  # noqa: F401

    main()
