"""Pipeline-parallel training of PyTorch models, in one process or in several."""

from . import balance as balance
from . import nn as nn
from . import simulate as simulate
from ._batchnorm import DeferredBatchNorm as DeferredBatchNorm
from ._check import Finding as Finding
from ._check import Report as Report
from ._check import check as check
from ._flatten import flatten as flatten
from ._gpipe import GPipe as GPipe
from ._plan import Infeasible as Infeasible
from ._plan import Plan as Plan
from ._plan import plan as plan
from .checkpoint._phase import is_checkpointing as is_checkpointing
from .checkpoint._phase import is_recomputing as is_recomputing
from .engine._settings import inline as inline
from .module._partition import BalanceError as BalanceError
from .module._partition import recommend_auto_balance as recommend_auto_balance
from .module._partition import split_module as split_module
from .module._partition import verify_module as verify_module
from .schedule import Schedule as Schedule
from .timeline import Event as Event
from .timeline import Timeline as Timeline
from .timeline import record as record
from .values._leaves import Arguments as Arguments

__all__ = [
    "Arguments",
    "BalanceError",
    "DeferredBatchNorm",
    "Event",
    "Finding",
    "GPipe",
    "Infeasible",
    "Plan",
    "Report",
    "Schedule",
    "Timeline",
    "check",
    "flatten",
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
