"""Import rules: no cycles, and private names are used only in their own package or file."""

import ast
import importlib
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .pages import PACKAGES, ROOT


def grimp() -> Any:
    reason = "no graph of imports: import-linter, which brings grimp, is not installed"
    return pytest.importorskip("grimp", reason=reason)


each_package = pytest.mark.parametrize("name", PACKAGES)


@each_package
def test_no_import_cycles(name: str) -> None:
    """Late imports count as well. Imports only for types may be circular."""
    graph = grimp().build_graph(name, exclude_type_checking_imports=True, cache_dir=None)
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(edges) > 1
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules of the cycle


def test_engine_imports_follow_order_of_table() -> None:
    """Imports only for types count as well."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The files of the engine")[2].partition("## ")[0]
    order = re.findall(r"^\| `(\w+)\.py` \|", table, re.MULTILINE)
    graph = grimp().build_graph("gpipe", cache_dir=None)
    files = {module.rpartition(".")[2]: module for module in graph.find_descendants("gpipe.engine")}
    assert sorted(order) == sorted(files)
    for at, name in enumerate(order):
        imported = graph.find_modules_directly_imported_by(files[name])
        assert imported & {*files.values()} <= {files[each] for each in order[:at]}, name


@each_package
def test_a_package_uses_public_names_of_the_others(name: str) -> None:
    private = [
        f"{file.name}:{node.lineno}: {used}"
        for file, tree in trees(name).items()
        for node in ast.walk(tree)
        for used in used_of_others(node, name)
        if not is_offered(used)
    ]
    assert private == []


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("from profiler._count import situation", "profiler._count.situation"),
        ("import profiler._count", "profiler._count"),
        ("from profiler import _count", "profiler._count"),
        ("from profiler.sandbox import copy_on", "profiler.sandbox.copy_on"),
        ("profiler._count", "profiler._count"),
    ],
)
def test_what_is_private_is_seen(line: str, used: str) -> None:
    found = [each for node in ast.walk(ast.parse(line)) for each in used_of_others(node, "gpipe")]
    assert found == [used]
    assert not is_offered(used)
    assert is_offered("profiler.sandbox.copied")


def used_of_others(node: ast.AST, name: str) -> Iterator[str]:
    """The names of other packages that ``node`` imports or reads, with their modules."""
    others = {*PACKAGES} - {name}
    if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in others:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in others)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in others:
        yield ast.unparse(node)


def is_offered(used: str) -> bool:
    """Return whether a name is public: in ``__all__`` of a public module, or such a module itself."""
    owner, _, name = used.rpartition(".")
    if "._" in f".{used}":
        return False
    if not owner or name in getattr(importlib.import_module(owner), "__all__", ()):
        return True
    return hasattr(getattr(importlib.import_module(owner), name, None), "__all__")


OF_TORCH = {*dir(nn.Module()), *dir(torch.Tensor)}
"""Private names such as ``_modules`` and ``_version``, which have no public equivalent."""


@each_package
def test_private_attributes_stay_in_their_file(name: str) -> None:
    found = trees(name)
    owners: dict[str, set[Path]] = {}
    for file, tree in found.items():
        for own in private_names(tree) - OF_TORCH:
            owners.setdefault(own, set()).add(file)
    others = [
        f"{file.name}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in found.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()")
        if file not in owners.get(node.attr, {file})
    ]
    assert others == []


def private_names(tree: ast.Module) -> set[str]:
    """The private names that a file defines or sets, of objects too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {each for each in found if each.startswith("_") and not each.startswith("__")}


def trees(name: str) -> dict[Path, ast.Module]:
    files = (ROOT / "packages" / name / "src").rglob("*.py")
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
