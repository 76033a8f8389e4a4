"""Split a sequence of costs into contiguous blocks, minimizing the largest block sum, with a proof of optimality."""

from ._place import place as place
from ._results import Infeasible as Infeasible
from ._results import Partition as Partition
from ._results import Placement as Placement
from ._solve import partition as partition
from ._solve import solve as solve
from ._stages import Mode as Mode
from ._stages import Stage as Stage
from ._verify import verify as verify

__all__ = ["Infeasible", "Mode", "Partition", "Placement", "Stage", "partition", "place", "solve", "verify"]

__version__ = "0.1.0"
