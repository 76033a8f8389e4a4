"""Plans as JSON, and back by a reader that accepts nothing else."""

from __future__ import annotations

import json
import sys
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, TypeVar

from ..schedule import CHECKPOINT_MODES
from ._arguments import SCHEDULES
from ._data import PlanData

Plan = TypeVar("Plan", bound=PlanData)

SCHEMA = "gpipe-plan/1"


def dump(plan: PlanData) -> str:
    """The plan as text that :func:`load` reads back as an equal one."""
    return json.dumps({"schema": SCHEMA, **_document(plan)}, indent=1, allow_nan=False)


def _document(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _document(getattr(value, each.name)) for each in _shown(type(value))}
    return [_document(each) for each in value] if isinstance(value, tuple) else value


def _shown(cls: Any) -> list[Any]:
    return [each for each in fields(cls) if not each.name.startswith("_")]


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
    document = _parse(text)
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema: this version reads {SCHEMA!r}, got {schema!r}; plan again")
    if "replicas" not in document and "ranks" not in document:  # written before there were any
        document = {"replicas": 1, "ranks": list(range(_stages(document))), "reduction": 0.0, **document}
    plan: Plan = _read(cls, document, "plan")
    _expect_consistent(plan)
    return plan


def _stages(document: dict[str, Any]) -> int:
    sizes = document.get("sizes")
    return len(sizes) if isinstance(sizes, list) else 0


def _parse(text: str) -> Any:
    def constant(name: str) -> NoReturn:
        raise ValueError(f"plan: expected numbers of JSON, got {name}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("plan: a key occurs twice")
        return found

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("plan: "):
            raise
        raise ValueError(f"plan: expected the text that Plan.to_json wrote, got no JSON: {error}") from None


def _read(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, which is a dataclass, a tuple, a union with None or of text and a tuple, or plain."""
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(_read(of[0], each, f"{where}[{k}]") for k, each in enumerate(value))
    if origin is types.UnionType:
        if type(None) not in of:
            return _read(of[isinstance(value, list)], value, where)
        return None if value is None else _read(next(each for each in of if each is not type(None)), value, where)
    return _read_plain(kind, value, where)


def _read_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    kinds = typing.get_type_hints(cls)
    names = [each.name for each in _shown(cls)]
    if missing := set(names) - value.keys():
        raise ValueError(f"{where}: lacks {', '.join(sorted(missing))}")
    if surplus := value.keys() - set(names):
        raise ValueError(f"{where}: does not know {', '.join(sorted(surplus))}")
    read = {name: _read(kinds[name], value[name], f"{where}.{name}") for name in names}
    try:
        return cls(**read)
    except ValueError as error:  # of figures that contradict each other
        raise ValueError(f"{where}.{error}") from None


def _read_plain(kind: type, value: Any, where: str) -> Any:
    if (kind is str and isinstance(value, str)) or (kind is bool and isinstance(value, bool)):
        return value
    if kind is int and type(value) is int and 0 <= value < 2**63:
        return value
    if kind is float and type(value) in (int, float) and 0 <= value <= sys.float_info.max:
        return value
    expected = {
        str: "a string",
        bool: "true or false",
        int: "an integer from 0 to 2**63 - 1",
        float: "a number that is not negative",
    }
    raise ValueError(f"{where}: expected {expected[kind]}, got {value!r}")


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
