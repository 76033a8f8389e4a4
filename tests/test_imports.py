"""No module of a package needs itself, not even by a late import. What is for types alone may point to an owner."""

from graphlib import TopologicalSorter

import pytest

from .pages import PACKAGES

grimp = pytest.importorskip("grimp", reason="no graph of imports: import-linter, which brings grimp, is not installed")


@pytest.mark.parametrize("name", PACKAGES)
def test_no_module_imports_itself_by_others(name: str) -> None:
    graph = grimp.build_graph(name, exclude_type_checking_imports=True, cache_dir=None)
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(edges) > 1
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the modules of the cycle
