"""Pipeline-parallel training of sequential PyTorch models in one process."""

from ._batchnorm import DeferredBatchNorm as DeferredBatchNorm
from ._checkpoint import is_checkpointing as is_checkpointing
from ._checkpoint import is_recomputing as is_recomputing
from ._gpipe import GPipe as GPipe
from ._inline import inline as inline
from ._split import BalanceError as BalanceError
from ._split import recommend_auto_balance as recommend_auto_balance
from ._split import split_module as split_module
from ._split import verify_module as verify_module
from ._value import Arguments as Arguments
from .timeline import Event as Event
from .timeline import Timeline as Timeline
from .timeline import record as record

__all__ = [
    "Arguments",
    "BalanceError",
    "DeferredBatchNorm",
    "Event",
    "GPipe",
    "Timeline",
    "inline",
    "is_checkpointing",
    "is_recomputing",
    "recommend_auto_balance",
    "record",
    "split_module",
    "verify_module",
]
__version__ = "0.1.0"
