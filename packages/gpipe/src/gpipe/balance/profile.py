"""Aliases for code written for torchgpipe: functions of :mod:`profiler`."""

from profiler import detach as detach
from profiler import layerwise_sandbox as layerwise_sandbox
from profiler import profile_sizes as profile_sizes
from profiler import profile_times as profile_times
