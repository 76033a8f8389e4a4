"""A folder whose content is replaced as a whole: a reader finds the old content or the new one, never a mixture.

The new content is written to a folder beside it. Then the old folder is renamed, the new one gets its name, and the old
one is deleted. If that is interrupted, :attr:`Folder.whole` finds the old one under its other name.
"""

from __future__ import annotations

import os
import shutil
from os import PathLike
from pathlib import Path

_COMMITTED = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""


class Folder:
    """The folder of a checkpoint; ``partial`` is the folder to which new content is written."""

    def __init__(self, path: str | PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise ValueError(f"path: expected a folder that all processes reach, got the address {str(path)!r}")
        self.path = Path(path).resolve()
        self.partial, self._previous = [self.path.with_name(f"{self.path.name}.{k}") for k in ("partial", "previous")]

    @property
    def whole(self) -> Path:
        """The folder that has the last complete content; FileNotFoundError if there is none."""
        place = self.path if self.path.exists() else self._previous
        if not (place / _COMMITTED).is_file():
            raise FileNotFoundError(f"path: there is no whole checkpoint in {str(self.path)!r}; save() finished none")
        return place

    def begin(self) -> None:
        """Make an empty folder for new content; delete what an interrupted save has left, and nothing else."""
        if self.path.exists() and not (self.path / _COMMITTED).is_file() and not _is_empty(self.path):
            raise FileExistsError(
                f"path: {str(self.path)!r} exists and is not a checkpoint; give the name of a new folder"
            )
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def commit(self) -> None:
        """Replace the content of the folder by that of ``partial``."""
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
        self.partial.rename(self.path)
        shutil.rmtree(self._previous, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None
