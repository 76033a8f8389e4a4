"""Seconds and bytes of every layer of a sequential model."""

from ._sandbox import detach as detach
from ._sandbox import layerwise_sandbox as layerwise_sandbox
from ._sizes import profile_sizes as profile_sizes
from ._times import profile_times as profile_times

__version__ = "0.1.0"

__all__ = ["detach", "layerwise_sandbox", "profile_sizes", "profile_times"]
