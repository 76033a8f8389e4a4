"""Measure the time, memory and FLOPs of every layer of a sequential model."""

from ._allocations import AllocationTracker
from ._data import LayerProfile
from ._profile import profile, profile_seconds, profile_sizes, profile_times
from ._record import Profile
from ._skips import SkipLayer, SkipStore
from .sandbox import detach, layerwise_sandbox

__version__ = "0.1.0"

__all__ = [
    "AllocationTracker",
    "LayerProfile",
    "Profile",
    "SkipLayer",
    "SkipStore",
    "detach",
    "layerwise_sandbox",
    "profile",
    "profile_seconds",
    "profile_sizes",
    "profile_times",
]
