"""No module of a package needs itself, not even by a late import. What is for types alone may point to an owner."""

import re
from graphlib import TopologicalSorter

import pytest

from .pages import PACKAGES, ROOT

grimp = pytest.importorskip("grimp", reason="no graph of imports: import-linter, which brings grimp, is not installed")


@pytest.mark.parametrize("name", PACKAGES)
def test_no_module_imports_itself_by_others(name: str) -> None:
    graph = grimp.build_graph(name, exclude_type_checking_imports=True, cache_dir=None)
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(edges) > 1
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules of the cycle


def test_files_of_the_engine_import_only_those_above_them_in_the_table() -> None:
    """Also what they import for types alone."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The files of the engine")[2].partition("## ")[0]
    order = re.findall(r"^\| `(\w+)\.py` \|", table, re.MULTILINE)
    graph = grimp.build_graph("gpipe", cache_dir=None)
    files = {module.rpartition(".")[2]: module for module in graph.find_descendants("gpipe.engine")}
    assert sorted(order) == sorted(files)
    for at, name in enumerate(order):
        imported = graph.find_modules_directly_imported_by(files[name])
        assert imported & {*files.values()} <= {files[each] for each in order[:at]}, name
