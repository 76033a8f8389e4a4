"""A dispatch mode that is cheap to import and affects only the current thread."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A ``TorchDispatchMode`` that does not import ``torch._dynamo``, which takes seconds.

    Torch excludes a mode's own code from ``torch.compile``, and imports the compiler for this. This class does so only
    if the compiler is already imported.

    >>> class Counter(DispatchMode):
    ...     operations = 0
    ...     def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
    ...         self.operations += 1
    ...         return operation(*args, **(kwargs or {}))
    >>> x, counter = torch.ones(2), Counter()
    >>> with counter.pushed():
    ...     y = (x + 1).exp()
    >>> counter.operations
    2
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:
            _hide(type(self))  # type: ignore[arg-type]

    @contextmanager
    def pushed(self) -> Iterator[None]:
        """Intercept the operations of this thread inside a ``with`` block; other threads may have their own modes.

        ``with mode`` also sets a process-wide flag, which stays wrong if threads do not leave their modes in reverse
        order.
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
        # Otherwise compiled code that runs inside the mode would run eagerly everywhere from then on.
        return True


@cache
def _hide(mode: Any) -> None:
    mode.__torch_dispatch__ = torch.compiler.disable(mode.__torch_dispatch__)  # type: ignore[no-untyped-call]
