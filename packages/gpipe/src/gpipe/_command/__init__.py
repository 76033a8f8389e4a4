"""The ``gpipe`` command-line interface."""

from ._app import run as run

__all__ = ["run"]
