"""torchgpipe's module path of functions that the package :mod:`profiler` has under the same names."""

from profiler import detach as detach
from profiler import layerwise_sandbox as layerwise_sandbox
from profiler import profile_sizes as profile_sizes
from profiler import profile_times as profile_times
