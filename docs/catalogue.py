"""Collect the catalogue of errors from the sources of each package, with <holes> for varying parts.

This only parses the sources, so it even finds messages that no test raises.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

PACKAGES = Path(__file__).parents[1] / "packages"
HOLE = re.compile(r"<[^<>]+>")
MARK = re.compile(r"<!-- errors: (\S+) -->")


class Message(NamedTuple):
    """The message of an error or a warning.

    Attributes:
        topic: the module that raises it, or the folder of this module, such as ``gpipe.schedule``.
        kind: the name of its type, or "warning" if it is logged.
        text: the message, with ``<name>`` for varying parts.
    """

    topic: str
    kind: str
    text: str


def filled(page: str) -> str:
    """Replace each ``<!-- errors: topic -->`` in ``page`` by a list of messages; ``*`` means all remaining topics."""
    topics = set(MARK.findall(page))
    return MARK.sub(lambda mark: listed(chosen(mark[1], topics)), page)


def chosen(topic: str, others: set[str]) -> Iterator[Message]:
    package = topic.partition(".")[0]
    for message in messages(package):
        if message.topic == topic or (topic.endswith("*") and message.topic not in others):
            yield message


def listed(found: Iterable[Message]) -> str:
    return "\n".join(f"- **{each.kind}**: `` {each.text} ``" for each in found)


@cache
def messages(package: str) -> list[Message]:
    """Return all distinct messages of a package, sorted by topic."""
    source = PACKAGES / package / "src"
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in source.rglob("*.py")}
    kinds = errors_of(trees.values())
    shared = {name: text for tree in trees.values() for name, text in assigned_in(tree).items() if name.isupper()}
    found = [(file, each) for file, tree in trees.items() for each in errors_in(tree, kinds, shared)]
    return sorted({Message(topic_of(file.relative_to(source)), *each) for file, each in found})


def topic_of(file: Path) -> str:
    return ".".join(part.strip("_") for part in file.with_suffix("").parts[:2])


def errors_of(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of errors that users may see: builtin ones except AssertionError, and their subclasses."""
    errors = {name for name, it in vars(builtins).items() if isinstance(it, type) and issubclass(it, Exception)}
    own = errors - {"AssertionError"}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return own | {each.name for each in classes if any(ast.unparse(base) in own for base in each.bases)}


def assigned_in(tree: ast.Module) -> dict[str, ast.expr]:
    return {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}


def errors_in(tree: ast.Module, kinds: set[str], shared: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """Yield the type and text of each warning of a module, and of each error that it creates.

    A module may import the constants of its package, which are in ``shared``.
    """
    words = Words(tree, shared)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (kind := kind_of(node.func, kinds)):
            text = " ".join(with_arguments(words.of(node.args[0]), node.args[1:]).split())
            if re.search("[a-z]{2}", HOLE.sub("", text)):  # more than a name that is passed on
                yield kind, text


def kind_of(called: ast.expr, kinds: set[str]) -> str | None:
    if ast.unparse(called) == "_log.warning":
        return "warning"
    return called.id if isinstance(called, ast.Name) and called.id in kinds else None


def with_arguments(text: str, arguments: list[ast.expr]) -> str:
    """Replace the conversions of logging in ``text`` by the names of ``arguments``."""
    names = map(name_of, arguments)
    return re.sub("%[sdrg]", lambda _: f"<{next(names, '…')}>", text) if arguments else text


class Words:
    """Converts the expressions of a module to text, as far as their values are written in it."""

    def __init__(self, tree: ast.Module, shared: dict[str, ast.expr]) -> None:
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._elsewhere = shared | assigned_in(tree)
        self._elsewhere |= {each.name: text for each in functions if (text := only_return(each)) is not None}

    def of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.of, node.values))
        if isinstance(node, ast.FormattedValue):
            return self.of(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.of(node.left) + self.of(node.right)
        if isinstance(node, ast.IfExp):
            return f"({self.of(node.body)} | {self.of(node.orelse)})"
        return self._written_elsewhere(node) or f"<{name_of(node)}>"

    def _written_elsewhere(self, node: ast.expr) -> str:
        """Return the text in the first argument of a call, in the called function, or in a constant; "" if none."""
        given, function = (node.args[:1], node.func) if isinstance(node, ast.Call) else ([], node)
        name = ast.unparse(function).rpartition(".")[2]
        own = self._elsewhere.pop(name, None)  # removed temporarily, since a function may call itself
        found = next((self.of(each) for each in (*given, own) if is_text(each)), "")
        if own is not None:
            self._elsewhere[name] = own
        return found


def is_text(node: ast.expr | None) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def only_return(function: ast.FunctionDef) -> ast.expr | None:
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return returned[0] if len(returned) == 1 else None


def name_of(node: ast.expr) -> str:
    """Return a name for the value of an expression."""
    if isinstance(node, ast.Attribute):
        return name_of(node.value) if node.attr == "__name__" else node.attr.strip("_")
    if isinstance(node, ast.Call):
        return name_of_call(node)
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return name_of(node.value)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return name_of(node.elt)
    return ast.unparse(node).strip("_")


def name_of_call(node: ast.Call) -> str:
    called = ast.unparse(node.func).rpartition(".")[2].strip("_")
    given = [name_of(each) for each in node.args]
    if given and called in ("len", "type"):
        return f"{'number' if called == 'len' else 'type'} of {given[0]}"
    if given and called in ("join", "str", "repr", "list", "tuple", "sorted", "map", "dict", "set"):
        return given[-1]
    return called
