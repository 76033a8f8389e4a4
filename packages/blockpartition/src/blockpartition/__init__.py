"""Cut a sequence of costs into contiguous blocks whose largest sum is the least possible, with a proof."""

from ._certificate import verify as verify
from ._partition import Partition as Partition
from ._solve import partition as partition
from ._solve import solve as solve

__all__ = ["Partition", "partition", "solve", "verify"]

__version__ = "0.1.0"
