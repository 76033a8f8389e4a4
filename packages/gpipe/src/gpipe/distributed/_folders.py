"""A folder whose content is replaced as a whole: who reads it finds the old one or the new one, never a part.

The new content is written beside it. At the end the old one steps aside, the new one takes its name, and the old one is
deleted. If that is interrupted in between, the old one is still beside it, where :attr:`Folder.whole` finds it.
"""

from __future__ import annotations

import os
import shutil
from os import PathLike
from pathlib import Path

_COMMITTED = ".metadata"
"""What torch.distributed.checkpoint writes last."""


class Folder:
    """Where a checkpoint is, or will be.

    Args:
        path: of the folder.

    Attributes:
        path: of the folder.
        partial: where new content is written.

    Raises:
        TypeError, ValueError: that is no path of a folder.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        text = os.fspath(path)
        if not isinstance(text, str):
            raise TypeError(f"path: expected a str or a path, got {type(path).__name__}")
        if "://" in text:
            raise ValueError(f"path: expected a folder that all processes reach, got the address {text!r}")
        self.path = Path(os.path.realpath(text))
        self.partial = self._beside("partial")
        self._previous = self._beside("previous")

    def _beside(self, word: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{word}")

    @property
    def whole(self) -> Path:
        """Where the last whole content is.

        Raises:
            FileNotFoundError: there is none.
        """
        places = [self.path] if self.path.exists() else [self._previous]
        for place in places:
            if (place / _COMMITTED).is_file():
                return place
        raise FileNotFoundError(
            f"path: there is no whole checkpoint in {str(self.path)!r}; save() has not finished one"
        )

    def begin(self) -> None:
        """Make place for new content; what an interrupted save has left there is deleted.

        Raises:
            FileExistsError: the folder holds other things than a checkpoint, which would be lost.
        """
        if self.path.exists() and not (self.path / _COMMITTED).is_file() and not _is_empty(self.path):
            raise FileExistsError(
                f"path: {str(self.path)!r} exists and is not a checkpoint; give the name of a new folder"
            )
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def commit(self) -> None:
        """What is in ``partial`` is whole now: let it take the name of the folder."""
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
        self.partial.rename(self.path)
        shutil.rmtree(self._previous, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None
