"""A module of gpipe has its tests in the file of its name, or they are found here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

GPIPE = Path(__file__).parents[1] / "packages" / "gpipe"

ELSEWHERE = {
    "_check/*": "check",
    "_command/*": "command",
    "_flatten/*": "flatten",
    "_meant": "named",
    "_moments": "batchnorm",
    "_plan/_bytes": "plan_memory",
    "_plan/_candidate": "plan_search",
    "_plan/_costs": "plan_search",
    "_plan/_fake": "plan_fake",
    "_plan/_infeasible": "plan_search",
    "_plan/_measure": "plan_memory",
    "_plan/_options": "plan_search",
    "_plan/_rehearse": "plan_memory",
    "_plan/_search": "plan_search",
    "_plan/_verify": "plan_memory",
    "_plan/*": "plan",
    "balance/_cuts": "balance",
    "checkpoint/_generators": "random",
    "checkpoint/_hook_snapshot": "checkpoint",
    "checkpoint/_operations": "interception",
    "checkpoint/_phase": "checkpoint",
    "distributed/*": "forms",
    "engine/_autograd_calls": "autograd",
    "engine/_capture": "graphs",
    "engine/_cell": "checkpoint",
    "engine/_deferred_gradients": "hooks",
    "engine/_failed_cell": "oom",
    "engine/_mini_batch": "pipeline",
    "engine/_piecewise": "pieces",
    "engine/_run": "pipeline",
    "engine/_settings": "inline",
    "engine/_stage": "placement",
    "engine/_stage_runner": "pipeline",
    "module/_cut": "gpipe",
    "module/_devices": "gpipe",
    "module/_divided": "gpipe",
    "module/_init/*": "materialize",
    "module/_sequential": "gpipe",
    "module/_swap": "rebalance",
    "nn/*": "nn",
    "schedule/_lanes": "makespan",
    "schedule/_orders": "builders",
    "schedule/*": "schedule",
    "skip/*": "skip",
    "timeline/_chrome": "pictures",
    "timeline/_costs": "simulate",
    "timeline/_html": "notebooks",
    "timeline/_png": "pictures",
    "timeline/_svg": "pictures",
    "timeline/*": "timeline",
    "values/_constants": "values",
    "values/_describe": "failures",
    "values/_gather": "aliases",
    "values/_sharing": "aliases",
}
"""The first pattern that fits a module is the one that counts."""


def modules() -> list[str]:
    """All that hold more than names of others: those that begin with an underscore."""
    root = GPIPE / "src" / "gpipe"
    names = [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("_*.py")]
    return sorted(name for name in names if not name.endswith("__"))


def has_tests(name: str) -> bool:
    return (GPIPE / "tests" / f"test_{name}.py").exists()


def own(module: str) -> str:
    return module.rpartition("/")[2].lstrip("_")


def pattern(module: str) -> str | None:
    return next((each for each in ELSEWHERE if fnmatchcase(module, each)), None)


def test_every_module_has_a_file_of_tests() -> None:
    lost = [module for module in modules() if not has_tests(own(module)) and pattern(module) is None]
    assert not lost
    assert not [name for name in ELSEWHERE.values() if not has_tests(name)]


def test_nothing_is_listed_that_is_gone_or_has_tests_of_its_own() -> None:
    needed = {pattern(module) for module in modules() if not has_tests(own(module))}
    assert not ELSEWHERE.keys() - needed
