"""The path of torchgpipe to what the package :mod:`profiler` offers under the same names."""

from profiler import detach as detach
from profiler import layerwise_sandbox as layerwise_sandbox
from profiler import profile_sizes as profile_sizes
from profiler import profile_times as profile_times
