"""The same pipe with its stages in several processes, as ``torchrun`` starts them."""

from ._average import average_gradients
from ._checkpoints import load, save
from ._errors import LostRankError, RemoteError
from ._rank import Rank

__all__ = ["LostRankError", "Rank", "RemoteError", "average_gradients", "load", "save"]
