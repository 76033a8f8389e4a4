"""Cut a mini-batch into micro-batches, and concatenate the results."""

from ._arguments import Arguments as Arguments
from ._batch import Batch as Batch
from ._batch import Function as Function
from ._batch import TensorOrTensors as TensorOrTensors
from ._batch import Tensors as Tensors
from ._check import check as check
from ._concatenate import concatenate as concatenate
from ._gather import gather as gather
from ._rules import Mean as Mean
from ._rules import Replicate as Replicate
from ._rules import Split as Split
from ._rules import Sum as Sum
from ._scatter import scatter as scatter
from ._scatter import scatter_views as scatter_views
from ._spec import rules as rules
from ._spec import unwrap as unwrap
from ._tree import flatten as flatten
from ._tree import is_flat as is_flat
from ._tree import leaf_paths as leaf_paths
from ._tree import map_tensors as map_tensors
from ._tree import unflatten as unflatten
from ._versions import Versions as Versions

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "Batch",
    "Function",
    "Mean",
    "Replicate",
    "Split",
    "Sum",
    "TensorOrTensors",
    "Tensors",
    "Versions",
    "check",
    "concatenate",
    "flatten",
    "gather",
    "is_flat",
    "leaf_paths",
    "map_tensors",
    "rules",
    "scatter",
    "scatter_views",
    "unflatten",
    "unwrap",
]
