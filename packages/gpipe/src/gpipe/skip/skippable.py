"""Layers that stash and pop, and a check that each skip is stashed once and popped once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from .._current import Store, current, doing
from .namespace import Key, Namespace

Layer = TypeVar("Layer", bound=type[nn.Module])


class stash:  # noqa: N801 — reads as a command after `yield`
    """``yield stash(name, tensor)`` passes ``tensor``, which may be None, to the layer that pops ``name``."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"stash({name!r}, ...) takes a tensor or None; got {type(tensor).__name__}")
        self.name = name
        self.tensor = tensor


class pop:  # noqa: N801
    """``tensor = yield pop(name)`` returns the tensor that an earlier layer stashed as ``name``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """The base of the classes that :func:`skippable` creates, which are also subclasses of the decorated class."""

    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()
    _commands: ClassVar[Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the ``forward`` of the decorated class, and perform the stash and pop commands that it yields.

        Args:
            args, kwargs: the arguments of the layer.

        Returns:
            The result of the layer.

        Raises:
            TypeError: the layer yields something that is not a stash or pop.
            RuntimeError: the layer does not stash or pop a skip that it declares, or a skip is not declared or was not
                stashed.
        """
        commands = type(self)._commands(self, *args, **kwargs)
        # A forward without yield is not a generator, but its declared skips are still checked.
        left = {("stashed", name) for name in self.stashable_names} | {("popped", name) for name in self.poppable_names}
        result, answer = commands, None
        while isinstance(commands, Generator):
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                result = stop.value
                break
            answer = self._carry_out(command)
            left.discard(("stashed" if isinstance(command, stash) else "popped", command.name))
        if left:
            participle, name = min(left)
            raise RuntimeError(f"{name!r} must be {participle} but has not been")
        return result

    def isolate(self: Any, ns: Namespace, *, only: Iterable[str] | None = None) -> Any:
        """Put the skips of this layer into a namespace.

        Args:
            ns: the namespace.
            only: the names of the skips; by default all that the layer declares.

        Returns:
            The layer itself.

        Raises:
            TypeError: ``ns`` is not a :class:`Namespace`, or ``only`` is a str instead of a list of names.
            ValueError: the layer does not declare a name in ``only``.
        """
        if not isinstance(ns, Namespace):
            raise TypeError(f"ns must be a Namespace; got {type(ns).__name__}")
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names("only", only)
        if names - declared:
            raise ValueError(f"only names {sorted(names - declared)}, but this layer declares {sorted(declared)}")
        # Created lazily, because decorated classes need not call the __init__ of this class.
        self.__dict__["_namespaces"] = {**self._by_name(), **dict.fromkeys(names, ns)}
        return self

    def key(self, name: str) -> Key:
        """Return the key of the skip ``name`` in this layer.

        Args:
            name: the name that the layer declares.

        Returns:
            The namespace of the skip, and its name.
        """
        return self._by_name().get(name), name

    def stashable(self) -> list[Key]:
        """Return the keys of the skips that this layer stashes."""
        return [self.key(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Key]:
        """Return the keys of the skips that this layer pops."""
        return [self.key(name) for name in sorted(self.poppable_names)]

    def route_skips(self, store: Store) -> AbstractContextManager[None]:
        """Make this layer stash to and pop from ``store``. Profilers that run the layer in isolation call this method.

        Args:
            store: a dict, or a different mapping of skips.

        Returns:
            A context manager that the forward runs in.
        """
        return doing(skips=store)

    def _by_name(self) -> dict[str, Namespace]:
        by_name: dict[str, Namespace] = self.__dict__.get("_namespaces", {})
        return by_name

    def _carry_out(self, command: object) -> Tensor | None:
        if not isinstance(command, (stash, pop)):
            raise TypeError(
                f"{command!r} is not a command of a skippable layer; yield stash(name, tensor) or pop(name)"
            )
        names, what = self.stashable_names, "stashable"
        if isinstance(command, pop):
            names, what = self.poppable_names, "poppable"
        if command.name not in names:
            raise RuntimeError(f"{command.name!r} has not been declared as {what}; this layer declares {sorted(names)}")
        if isinstance(command, stash):
            current.work.skips[self.key(command.name)] = command.tensor
            return None
        try:
            return current.work.skips.pop(self.key(command.name))
        except KeyError:
            raise RuntimeError(f"{command.name!r} is popped, but no earlier layer has stashed it") from None


def own_forward(layer: Skippable) -> Callable[..., Any]:
    """Return the ``forward`` of the decorated class, which yields its stashes and pops."""
    forward: Callable[..., Any] = type(layer)._commands.__get__(layer)
    return forward


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a layer class whose ``forward`` stashes and pops skips with ``yield``.

    Args:
        stash: the names of the skips that a forward stashes, each exactly once.
        pop: the names of the skips that a forward pops, each exactly once.

    Returns:
        A class decorator that creates a subclass of the layer's class and :class:`Skippable`.

    Raises:
        TypeError: an argument is a str instead of a list of names.
    """
    stashes, pops = _names("stash", stash), _names("pop", pop)

    def decorate(layer: type[nn.Module]) -> type[Skippable]:
        members = {
            "stashable_names": stashes,
            "poppable_names": pops,
            "_commands": layer.forward,
            "__module__": layer.__module__,
            "__qualname__": layer.__qualname__,
            "__doc__": layer.__doc__,
        }
        return type(layer.__name__, (Skippable, layer), members)

    return decorate


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, not a str; write {argument}=[{names!r}]")
    names = frozenset(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be a list of names; {name!r} is of type {type(name).__name__}")
    return names


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip is stashed once, and popped once by a later layer.

    Args:
        module: all layers, in order.

    Raises:
        TypeError: a skip is declared twice, popped before it is stashed, or missing on one side. The message lists all
            such skips.
    """
    problems = list(_problems(module))
    if problems:
        bullets = "\n".join(f"* {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{bullets}")


def _problems(module: nn.Module) -> Iterator[str]:
    stashed: set[Key] = set()
    popped: set[Key] = set()
    for name, layer in module.named_modules():
        if not isinstance(layer, Skippable):
            continue
        for skip in sorted(layer.stashable_names & layer.poppable_names):
            yield f"'{name}' declared '{skip}' both as stashable and as poppable"
        for key in layer.stashable():
            if key in stashed:
                yield f"'{name}' redeclared '{key[1]}' as stashable but not isolated by namespace"
            stashed.add(key)
        for key in layer.poppable():
            if key in popped:
                yield f"'{name}' redeclared '{key[1]}' as poppable but not isolated by namespace"
            elif key not in stashed:
                yield f"'{name}' declared '{key[1]}' as poppable but it was not stashed"
            popped.add(key)
    # Sort the names, because the order of a set differs between processes.
    for _, skip in sorted(stashed - popped, key=lambda key: key[1]):
        yield f"no module declared '{skip}' as poppable but stashed"
