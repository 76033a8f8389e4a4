"""Seconds and bytes of every layer of a sequential model."""

__version__ = "0.1.0"
