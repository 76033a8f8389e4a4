"""Pipeline-parallel training of sequential PyTorch models in one process."""

__version__ = "0.1.0"
