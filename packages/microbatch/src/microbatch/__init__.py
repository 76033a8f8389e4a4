"""Split a mini-batch into micro-batches, and concatenate the results."""

from ._arguments import Arguments
from ._batch import Batch, Function, TensorOrTensors, Tensors
from ._gather import concatenate, gather
from ._paths import leaf_paths
from ._rules import Entries, Mean, Replicate, Split, Sum
from ._scatter import check, scatter, scatter_views
from ._spec import rules, unwrap
from ._tree import flatten, is_flat, map_tensors, unflatten
from ._versions import Versions

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "Batch",
    "Entries",
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
