"""Plans as JSON, and back by a reader that accepts nothing else."""

from __future__ import annotations

from typing import TypeVar

from profiler import documents

from ..schedule import CHECKPOINT_MODES
from ._arguments import SCHEDULES
from ._data import PlanData

Plan = TypeVar("Plan", bound=PlanData)

SCHEMA = "gpipe-plan/1"


def dump(plan: PlanData) -> str:
    """The plan as text that :func:`load` reads back as an equal one."""
    return documents.dump(plan, SCHEMA)


def load(cls: type[Plan], text: str) -> Plan:
    """The plan that :func:`dump` wrote.

    Args:
        cls: the class of the plan.
        text: JSON.

    Returns:
        An equal plan.

    Raises:
        ValueError: names the path of the first thing that :func:`dump` would not have written.
    """
    plan = documents.load(cls, text, "plan", SCHEMA)
    _expect_consistent(plan)
    return plan


def _expect_consistent(plan: PlanData) -> None:
    """ValueError, naming the field, unless everything is there for each stage, and the stages have all layers."""
    stages = len(plan.sizes)
    if not stages or sum(plan.sizes) != len(plan.layers) or 0 in plan.sizes:
        raise ValueError(f"plan.sizes: expected positive numbers that sum up to {len(plan.layers)} layers")
    for name in ("devices", "memory", "modes", "stages", "hops", "ranks"):
        if len(getattr(plan, name)) != stages:
            raise ValueError(f"plan.{name}: expected one for each of {stages} stages, got {len(getattr(plan, name))}")
    if len(plan.predicted.bytes) != stages:
        raise ValueError(f"plan.predicted.bytes: expected one for each of {stages} stages")
    for j, (mode, size) in enumerate(zip(plan.modes, plan.sizes, strict=True)):
        if not isinstance(mode, str) and len(mode) != size:
            raise ValueError(f"plan.modes[{j}]: expected a flag for each of {size} layers, got {len(mode)}")
        if isinstance(mode, str) and mode not in CHECKPOINT_MODES:
            raise ValueError(f"plan.modes[{j}]: expected one of {', '.join(CHECKPOINT_MODES)}, got {mode!r}")
    if sorted(set(plan.ranks)) != list(range(len(set(plan.ranks)))):
        raise ValueError(f"plan.ranks: expected ranks from 0 on, each with a stage, got {list(plan.ranks)}")
    if not plan.rows or not plan.replicas or plan.rows % plan.replicas:
        raise ValueError(f"plan.replicas: expected a divisor of {plan.rows} rows, got {plan.replicas}")
    own = plan.rows // plan.replicas
    if not 0 < plan.chunks <= own:
        raise ValueError(f"plan.chunks: expected a number from 1 to {own}, the rows of a replica, got {plan.chunks}")
    if plan.schedule not in SCHEDULES:
        raise ValueError(f"plan.schedule: expected one of {', '.join(SCHEDULES)}, got {plan.schedule!r}")
    if set(plan.split) - set(range(stages)) or len(set(plan.split)) != len(plan.split):
        raise ValueError(f"plan.split: expected numbers of stages, each once, got {list(plan.split)}")
    for k, other in enumerate(plan.alternatives):
        if not other.balance or len(other.balance) != len(other.checkpoint):
            raise ValueError(f"plan.alternatives[{k}]: expected a mode for each stage of its balance")
