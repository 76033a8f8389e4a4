"""Faults planted into the library, one at a time, for as long as a test needs them."""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One line of the library replaced by another.

    Attributes:
        name: what is wrong then.
        module: the module it is in.
        line: what the source says, once.
        instead: what it says with the fault.
    """

    name: str
    module: str
    line: str
    instead: str

    def __str__(self) -> str:
        return self.name


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the code of the module's functions, wherever they are referenced, with the changed source."""
    module = importlib.import_module(fault.module)
    right, wrong = dict(_functions(module)), dict(_functions(_changed(module, fault)))
    with ExitStack() as stack:
        for name, function in right.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = wrong[name].__code__
        yield


def _changed(module: ModuleType, fault: Fault) -> ModuleType:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(fault.line) == 1, (
        f"{fault.name}: {fault.line!r} is in {fault.module} {source.count(fault.line)} times"
    )
    changed = ModuleType(module.__name__)
    changed.__package__, changed.__file__ = module.__package__, module.__file__
    exec(compile(source.replace(fault.line, fault.instead), module.__file__, "exec"), vars(changed))
    return changed


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions and methods defined in the module, by qualified name."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members: dict[str, Any] = {name: value}
        if inspect.isclass(value):
            members = {f"{name}.{key}": member for key, member in vars(value).items()}
        for path, member in members.items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__:
                yield path, function
