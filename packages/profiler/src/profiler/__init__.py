"""Seconds, bytes and FLOPs of every layer of a sequential model."""

from ._allocations import AllocationTracker as AllocationTracker
from ._data import LayerProfile as LayerProfile
from ._profile import profile as profile
from ._profile import profile_seconds as profile_seconds
from ._profile import profile_sizes as profile_sizes
from ._profile import profile_times as profile_times
from ._record import Profile as Profile
from ._sandbox import detach as detach
from ._sandbox import layerwise_sandbox as layerwise_sandbox
from ._skips import SkipStore as SkipStore

__version__ = "0.1.0"

__all__ = [
    "AllocationTracker",
    "LayerProfile",
    "Profile",
    "SkipStore",
    "detach",
    "layerwise_sandbox",
    "profile",
    "profile_seconds",
    "profile_sizes",
    "profile_times",
]
