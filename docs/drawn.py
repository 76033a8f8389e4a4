"""The directive ``{drawn}``, which draws a timeline while the pages are built.

Its content is Python code whose last statement is an expression for the timeline. Names exist to the end of the page.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from torch import nn

import gpipe
from gpipe import schedule, simulate
from gpipe.timeline._svg import svg


class Drawn(SphinxDirective):
    """Show the content as code, and the picture below it. The argument is the title of the picture."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        code = "\n".join(self.content)
        title = self.arguments[0] if self.arguments else ""
        known = self.env.temp_data.setdefault("drawn", names())
        picture = nodes.raw("", svg([(title, drawn(code, known))]), format="html")
        return [nodes.literal_block(code, code, language="python"), nodes.container("", picture, classes=["picture"])]


def names() -> dict[str, Any]:
    """Return the names that the code of a page may use: the public names of gpipe, its schedules and simulations."""
    public = {name: getattr(module, name) for module in (gpipe, schedule, simulate) for name in module.__all__}
    return {"torch": torch, "nn": nn, **public}


def drawn(code: str, known: dict[str, Any]) -> Any:
    """Run the code with the ``known`` names, to which it may add, and return the value of its last expression."""
    *lines, last = ast.parse(code).body
    assert isinstance(last, ast.Expr), f"expected an expression in the last line, got {ast.unparse(last)}"
    exec(compile(ast.Module(lines, []), "<drawn>", "exec"), known)
    return eval(compile(ast.Expression(last.value), "<drawn>", "eval"), known)
