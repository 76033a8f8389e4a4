"""The tree of a value as JSON: ``["dict", ["x", "mask"], [branches...]]``, down to tensors and constants.

A class is written as module and name. The reader looks it up among imported modules, and accepts it only if it is of
the kind that the message says: a named tuple, a dataclass, a mapping, or a node registered with
``torch.utils._pytree``.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree

from microbatch import flatten, leaf_paths, unflatten

from ..values._aliases import Aliased, Plan, View
from ._constants import read, written
from ._names import class_of, name_of

Spec = Any


@dataclass
class _Probe:
    field: Any


# microbatch has one kind of node for all mappings and dataclasses that are not registered; its context holds their
# class and the names of their branches.
_probed: Spec = flatten(_Probe(None))[1]
_OPENED, _SHAPE = _probed.type, type(_probed.context)
_LEAF: Spec = flatten(None)[1]


class UnwrittenError(TypeError):
    """Something in a value cannot be written. The message is the end of a sentence that begins with its path.

    Attributes:
        trail: the nodes on the way to it, from the root, each with the number of the branch that leads on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.trail: list[tuple[Spec, int]] = []


def path_of(error: UnwrittenError, root: str = "output") -> str:
    """The path to the value of ``error``, as Python writes it, such as ``output['x'][1]``."""
    for spec, k in error.trail:
        if spec.type is not Aliased:  # the branches of an Aliased have no names
            root = _labels(spec, root)[k]
    return root


def _labels(spec: Spec, root: str) -> list[str]:
    """The paths of the branches of a node."""
    count = len(spec.children())
    try:
        node = unflatten([None] * count, _pytree.TreeSpec(spec.type, spec.context, [_LEAF] * count))
        return list(leaf_paths(node, root))
    except Exception:  # the class cannot be made with these branches
        return [f"{root}[{k}]" for k in range(count)]


def written_tree(spec: Spec, leaves: Iterator[Any]) -> Any:
    """A tree as JSON, given the JSON of its leaves.

    Raises:
        UnwrittenError: a node cannot be written, or ``leaves`` raise a TypeError.
    """
    try:
        if spec.is_leaf():
            return next(leaves)
        node = _node(spec)
    except TypeError as error:
        raise _as_unwritten(error) from error.__cause__
    branches = [_branch(spec, k, child, leaves) for k, child in enumerate(spec.children())]
    return [*node, *branches] if spec.type is torch.Size else [*node, branches]


def _as_unwritten(error: TypeError) -> UnwrittenError:
    return error if isinstance(error, UnwrittenError) else UnwrittenError(str(error))


def _branch(spec: Spec, k: int, child: Spec, leaves: Iterator[Any]) -> Any:
    try:
        return written_tree(child, leaves)
    except UnwrittenError as error:
        error.trail.insert(0, (spec, k))
        raise


def _node(spec: Spec) -> list[Any]:
    """The description of a node without its branches."""
    kind, context = spec.type, spec.context
    if kind in _WRITERS:
        return _WRITERS[kind](context)
    return ["node", name_of(kind), _written_context(kind, context)]


def _keys(names: Any) -> list[Any]:
    return [_key(name) for name in names]


def _key(name: Any) -> Any:
    try:
        return written(name)
    except TypeError as error:
        raise TypeError(f"has the key {name!r}, which {error}") from error


def _written_plain(shape: Any) -> list[Any]:
    word = "mapping" if issubclass(shape.type, Mapping) else "dataclass"
    return [word, name_of(shape.type), _keys(shape.names)]


def _written_default(context: Any) -> list[Any]:
    factory, names = context
    if factory is not None and not _is_builtin(factory):
        raise TypeError(
            f"makes its defaults by {factory!r}, which is not sent to another process; expected a builtin type or one "
            "of collections; make it a dict"
        )
    return ["defaultdict", factory and name_of(factory), _keys(names)]


def _is_builtin(factory: Any) -> bool:
    return isinstance(factory, type) and factory.__module__ in ("builtins", "collections")


def _written_plan(plan: Plan) -> list[Any]:
    leaves = (written(constant) if k is None else ["view", k] for k, constant in plan.leaves)
    return ["aliased", [*map(_written_view, plan.views)], written_tree(plan.tree, leaves)]


def _written_view(view: View) -> list[Any]:
    if view.shape is None:
        return [view.source]
    flags = [view.detached, view.conjugate, view.negative]
    return [view.source, [*view.shape], [*view.stride], view.offset, view.dtype and written(view.dtype)[1], *flags]


def _written_context(kind: type, context: Any) -> Any:
    """The context of a node, as the serializer that was registered with the class writes it, if there is one."""
    how = _pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    try:
        if how is not None and how.to_dumpable_context is not None:
            return json.loads(json.dumps(how.to_dumpable_context(context), allow_nan=False))
        return _owned(kind, written(context))
    except Exception as error:
        raise TypeError(
            f"is of class {kind.__qualname__}, whose context in torch.utils._pytree is not sent to another process; "
            "give register_pytree_node its to_dumpable_context and from_dumpable_context, or pass a dict"
        ) from error


def _owned(kind: type, context: Any) -> Any:
    """The context, or ValueError if it names another class: registered functions may call what is named there."""
    if isinstance(context, list):
        if context[:1] == ["class"] and not issubclass(class_of(context[1]), kind):
            raise ValueError(f"the context of a {kind.__qualname__} names the class {context[1]}")
        for part in context:
            _owned(kind, part)
    return context


_WRITERS: dict[Any, Callable[[Any], list[Any]]] = {
    tuple: lambda context: ["tuple"],
    list: lambda context: ["list"],
    dict: lambda names: ["dict", _keys(names)],
    OrderedDict: lambda names: ["OrderedDict", _keys(names)],
    defaultdict: _written_default,
    torch.Size: lambda context: ["Size"],  # a constant, although importing torch.fx registers it as a node
    deque: lambda maxlen: ["deque", maxlen],
    namedtuple: lambda kind: ["namedtuple", name_of(kind)],
    _OPENED: _written_plain,
    Aliased: _written_plan,
}


def read_tree(tree: Any, leaf: Callable[[Any], Any], leaves: list[Any]) -> Spec:
    """The tree that :func:`written_tree` has written. Raises ValueError if ``tree`` is nothing of the kind.

    Args:
        tree: what was written.
        leaf: a function from the JSON of a leaf to the leaf.
        leaves: a list to which the leaves are appended, in order.
    """
    if not isinstance(tree, list) or tree[0] not in _READERS:
        leaves.append(leaf(tree))
        return _LEAF
    word, *details, branches = tree
    children = [read_tree(branch, leaf, leaves) for branch in branches]
    kind, context = _READERS[word](len(children), *details)
    return _pytree.TreeSpec(kind, context, children)


Node = tuple[Any, Any]
"""The type and the context of a node."""


def _names(keys: list[Any], count: int) -> list[Any]:
    names = [read(key) for key in keys]
    if len(set(names)) != count or len(names) != count:
        raise ValueError(f"{count} branches cannot have the keys {names}")
    return names


def _expect(condition: bool, kind: type, what: str) -> None:
    if not condition:
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} is no {what}")


def _named_tuple(count: int, name: str) -> Node:
    kind: Any = class_of(name)
    fitting = _pytree.is_namedtuple_class(kind) and kind not in _pytree.SUPPORTED_NODES
    _expect(fitting and len(kind._fields) == count, kind, f"named tuple of {count}")
    return namedtuple, kind


def _dataclass(count: int, name: str, keys: list[Any]) -> Node:
    kind = class_of(name)
    names = _names(keys, count)
    fitting = not issubclass(kind, Mapping) and kind not in _pytree.SUPPORTED_NODES and is_dataclass(kind)
    _expect(fitting and [field.name for field in fields(kind)] == names, kind, f"dataclass of {names}")
    return _OPENED, _SHAPE(kind, tuple(names))


def _mapping(count: int, name: str, keys: list[Any]) -> Node:
    kind = class_of(name)
    _expect(issubclass(kind, Mapping) and kind not in _pytree.SUPPORTED_NODES, kind, "mapping")
    return _OPENED, _SHAPE(kind, tuple(_names(keys, count)))


def _default(count: int, factory: str | None, keys: list[Any]) -> Node:
    kind = None if factory is None else class_of(factory)
    _expect(kind is None or _is_builtin(kind), kind or object, "factory of defaults")
    return defaultdict, [kind, _names(keys, count)]


def _registered(count: int, name: str, context: Any) -> Node:
    kind = class_of(name)
    _expect(kind in _pytree.SUPPORTED_NODES and kind not in _WRITERS, kind, "node registered with torch.utils._pytree")
    how = _pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if how is not None and how.from_dumpable_context is not None:
        return kind, how.from_dumpable_context(context)
    return kind, read(_owned(kind, context))


def _aliased(count: int, views: list[Any], tree: Any) -> Node:
    found = [_view(*view) for view in views]
    leaves: list[tuple[int | None, Any]] = []
    spec = read_tree(tree, _planned, leaves)
    numbers = [k for k, _ in leaves if k is not None]
    if not {*numbers} <= {*range(len(found))} or not {view.source for view in found} <= {*range(count)}:
        raise ValueError(f"a view or a source is missing: {tree}")
    return Aliased, Plan(found, leaves, spec)


def _planned(leaf: Any) -> tuple[int | None, Any]:
    return (leaf[1], None) if isinstance(leaf, list) and leaf[0] == "view" else (None, read(leaf))


def _view(source: int, shape: Any = None, stride: Any = (), offset: int = 0, dtype: Any = None, *flags: bool) -> View:
    if shape is None:
        return View(source)
    return View(source, torch.Size(shape), tuple(stride), offset, dtype and read(["dtype", dtype]), *flags)


_READERS: dict[str, Callable[..., Node]] = {
    "tuple": lambda count: (tuple, None),
    "list": lambda count: (list, None),
    "dict": lambda count, names: (dict, _names(names, count)),
    "OrderedDict": lambda count, names: (OrderedDict, _names(names, count)),
    "defaultdict": _default,
    "deque": lambda count, maxlen: (deque, maxlen),
    "namedtuple": _named_tuple,
    "dataclass": _dataclass,
    "mapping": _mapping,
    "node": _registered,
    "aliased": _aliased,
}
