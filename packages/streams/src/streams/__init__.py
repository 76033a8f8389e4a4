"""One vocabulary for CUDA streams and the CPU, and workers that see what their caller saw."""

__version__ = "0.1.0"
