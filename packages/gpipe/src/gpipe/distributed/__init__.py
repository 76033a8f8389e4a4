"""Pipelines whose stages run in several processes, launched with ``torchrun``."""

from ._average_gradients import average_gradients
from ._batches import broadcast_batches
from ._checkpoints import load, save
from ._errors import LostRankError, RemoteError
from ._model_rank import ModelRank as _ModelRank  # noqa: F401 — the import registers the class
from ._rank import Rank
from ._scaler import GradScaler

__all__ = [
    "GradScaler",
    "LostRankError",
    "Rank",
    "RemoteError",
    "average_gradients",
    "broadcast_batches",
    "load",
    "save",
]
