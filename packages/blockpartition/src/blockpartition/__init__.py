"""Cut a sequence of costs into contiguous blocks whose largest sum is minimal, with a proof."""

from ._certificate import verify as verify
from ._infeasible import Infeasible as Infeasible
from ._partition import Partition as Partition
from ._partition import Placement as Placement
from ._place import place as place
from ._solve import partition as partition
from ._solve import solve as solve
from ._stages import Mode as Mode
from ._stages import Stage as Stage

__all__ = ["Infeasible", "Mode", "Partition", "Placement", "Stage", "partition", "place", "solve", "verify"]

__version__ = "0.1.0"
