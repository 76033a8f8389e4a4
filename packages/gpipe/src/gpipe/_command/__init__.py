"""The command line."""

from ._app import run as run

__all__ = ["run"]
