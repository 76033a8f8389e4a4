"""Cut a mini-batch into micro-batches and put it together again."""

from ._batch import Batch as Batch
from ._batch import Function as Function
from ._batch import TensorOrTensors as TensorOrTensors
from ._batch import Tensors as Tensors
from ._check import check as check
from ._gather import gather as gather
from ._scatter import scatter as scatter
from ._scatter import scatter_views as scatter_views
from ._spec import Replicate as Replicate
from ._spec import Split as Split
from ._versions import Versions as Versions

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Function",
    "Replicate",
    "Split",
    "TensorOrTensors",
    "Tensors",
    "Versions",
    "check",
    "gather",
    "scatter",
    "scatter_views",
]
