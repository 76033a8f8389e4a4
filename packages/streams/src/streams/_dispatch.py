"""A dispatch mode that costs no more than what it does, and stays on one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch's own, but without importing ``torch._dynamo`` for it, which takes seconds.

    Torch hides what a mode does from ``torch.compile``, and loads all of that at the mode's first operation. Here it is
    hidden once somebody else has loaded it: before, there is nobody to hide from.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:
            _hide(type(self))  # type: ignore[arg-type]

    @contextmanager
    def pushed(self) -> Iterator[None]:
        """Inside, the mode sees the operations of this thread.

        Use this where several threads have modes. ``with mode`` also sets a flag of the whole process, which stays
        wrong if threads leave their modes in another order than they entered them.
        """
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # A mode that looks into compiled code sends that code to eager for good, whoever owns it.
        return True


@cache
def _hide(mode: Any) -> None:
    mode.__torch_dispatch__ = torch._disable_dynamo(mode.__torch_dispatch__)  # type: ignore[attr-defined]
