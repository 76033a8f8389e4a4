"""The packages create every thread, lock and queue by ``streams.waiting``, so that tests can control scheduling."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from streams import waiting

ROOT = Path(__file__).parents[1]
SOURCES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.glob("packages/*/src/**/*.py"))}
DOOR = "packages/streams/src/streams/_waiting.py"
MODULES = {"threading", "_thread", "queue", "concurrent", "asyncio", "multiprocessing", "sched", "selectors", "socket"}
HARMLESS = {"local", "current_thread", "get_ident", "Empty"}
"""Names that never wait."""

EXCEPTIONS = {
    "packages/streams/src/streams/_exit.py": ({"time"}, "the exit of the interpreter has a deadline in real seconds"),
    "packages/gpipe/src/gpipe/distributed": (
        {"time", "socket", "multiprocessing"},
        "waits for other processes, which no scheduler of threads controls",
    ),
}
"""The only exceptions, with the reason."""


@lru_cache(1)
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


def attributes(module: str, tree: ast.AST) -> Iterator[str]:
    """The names that a file uses of ``module``, by import or as attributes."""
    nodes = nodes_of(tree)
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] == module:
            yield from (alias.name for alias in node.names)
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if module in imported and is_attribute and node.value.id == module:
            yield node.attr


def allowed(path: str) -> set[str]:
    return set().union(*(names for place, (names, _) in EXCEPTIONS.items() if path.startswith(place)))


def other_waits(path: str, tree: ast.AST) -> list[str]:
    """Return uses of waiting functions in a file that bypass ``streams.waiting``."""
    found = [f"{module}.{name}" for module in MODULES - allowed(path) for name in attributes(module, tree)]
    found += [f"time.{name}" for name in attributes("time", tree) if name == "sleep" and "time" not in allowed(path)]
    # ``from streams._waiting import Lock`` would be bound before a test replaces it.
    found += [
        f"{node.module}.{alias.name}"
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).rpartition(".")[2] in ("_waiting", "waiting")
        for alias in node.names
    ]
    found += [
        f"class ({ast.unparse(base)})"
        for node in nodes_of(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        # A subclass is bound to the class that was there when it was defined.
        if ast.unparse(base).startswith("waiting.")
    ]
    return [name for name in found if name.rpartition(".")[2] not in HARMLESS]


def test_only_waiting_makes_threads_and_locks() -> None:
    others = {path: other_waits(path, ast.parse(file.read_text())) for path, file in SOURCES.items() if path != DOOR}
    assert {path: names for path, names in others.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from threading import Lock",
        "import threading; threading.Event()",
        "from queue import SimpleQueue",
        "from concurrent.futures import Future",
        "from streams._waiting import Lock",
        "from ._waiting import Lock",
        "import time; time.sleep(1)",
        "class Worker(waiting.Thread): pass",
    ],
)
def test_other_ways_are_noticed(line: str) -> None:
    assert other_waits("packages/gpipe/src/gpipe/x.py", ast.parse(line))


def test_waiting_is_the_standard_library() -> None:
    assert {getattr(waiting, name).__module__ for name in vars(waiting) if name[0].isupper()} <= {
        "threading",
        "_thread",
        "_queue",
        "concurrent.futures._base",
        "concurrent.futures.thread",
        "builtins",
    }
