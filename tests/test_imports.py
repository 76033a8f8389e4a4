"""No module of a package needs itself, not even by a late import. What is for types alone may point to an owner."""

import ast
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"


def modules(root: Path) -> dict[str, Path]:
    """The files below ``root``, by the names they are imported by."""
    paths = {path: path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}


def imported(name: str, path: Path) -> set[str]:
    """Whatever the module imports to run, anywhere in its text; of ``from a import b`` both ``a.b`` and ``a``."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = set[str]()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in [*ast.walk(tree)]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            found.update(f"{source}.{each.name}" for each in node.names)
    return found


def graph(root: Path) -> dict[str, set[str]]:
    """For each module, those of the same package that it imports; a name in a module stands for the module."""
    known = modules(root)
    return {
        name: {each if each in known else each.rpartition(".")[0] for each in imported(name, path)} & known.keys()
        for name, path in known.items()
    }


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before, the first being the last; empty if there are none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("name", ["blockpartition", "gpipe", "microbatch", "profiler", "streams"])
def test_no_module_imports_itself_by_others(name: str) -> None:
    edges = graph(PACKAGES / name / "src")
    assert len(edges) > 1
    assert not cycle(edges)
