"""Pipeline-parallel training of PyTorch models, in one process or in several."""

import importlib as _importlib
import typing as _typing

from ._batchnorm import DeferredBatchNorm
from ._gpipe import GPipe
from .checkpoint._phase import is_checkpointing, is_recomputing
from .engine._loss_value import LossSum
from .engine._settings import inline
from .model._documents import Packed
from .model._pipe import ModelPipe as _ModelPipe  # noqa: F401 — the import registers the class
from .module._partition import BalanceError, recommend_auto_balance, split_module, verify_module
from .schedule import Schedule
from .values._leaves import Arguments

# These names, which a training loop does not need, are imported on first use: they take longer than all other imports.
if _typing.TYPE_CHECKING:
    from . import balance as balance
    from . import nn as nn
    from . import simulate as simulate
    from ._check import Finding, Report, check
    from ._plan import Infeasible, Plan, plan
    from .timeline import Event, Timeline, record

__all__ = [
    "Arguments",
    "BalanceError",
    "DeferredBatchNorm",
    "Event",
    "Finding",
    "GPipe",
    "Infeasible",
    "LossSum",
    "Packed",
    "Plan",
    "Report",
    "Schedule",
    "Timeline",
    "check",
    "inline",
    "is_checkpointing",
    "is_recomputing",
    "plan",
    "recommend_auto_balance",
    "record",
    "split_module",
    "verify_module",
]
__version__ = "0.1.0"

_MODULES = ("balance", "nn", "simulate", "timeline")
_LATER = {
    "_check": ("Finding", "Report", "check"),
    "_plan": ("Infeasible", "Plan", "plan"),
    "timeline": ("Event", "Timeline", "record"),
}


def __getattr__(name: str) -> _typing.Any:
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    for module, names in _LATER.items():
        if name in names:
            return getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
