"""Aliases for code written for torchgpipe: functions of :mod:`microbatch`."""

from microbatch import Batch as Batch
from microbatch import Function as Function
from microbatch import TensorOrTensors as TensorOrTensors
from microbatch import Tensors as Tensors
from microbatch import check as check
from microbatch import gather as gather
from microbatch import scatter as scatter
