"""Sphinx configuration. The build does not access the network."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from docutils import nodes

import gpipe

sys.path.insert(0, str(Path(__file__).parent))
from catalogue import filled
from drawn import Drawn

project = "gpipe"
version = release = gpipe.__version__
project_copyright = "2026, the gpipe-torch contributors. BSD-3-Clause"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# Docstrings are written to be read in an editor: `name` there means code.
default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
# Inherited docstrings of PyTorch use different markup.
autodoc_inherit_docstrings = False
# Attributes are explained in their class, so that an attribute that is also a property has only one entry.
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"gpipe {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

EXPLAINED = re.compile(r"([a-z]\w*(?:, \w+)*): (.+)")
PAGE = re.compile(r"`docs/([\w/-]+\.md)`")
CODE_IN_A_WORD = re.compile(r"(?<!`)(`[^`]+`)(?=\w)")  # as in `Stage`s, where the markup needs a separator


def explain_names(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Convert paragraphs of `name: explanation` lines, which Sphinx would join, to definition lists."""
    whole = [CODE_IN_A_WORD.sub(r"\1\\ ", line) for line in lines]
    paragraphs = [list(group) for blank, group in groupby(whole, key=lambda line: not line.strip()) if not blank]
    lines[:] = [line for paragraph in paragraphs for line in [*definitions(paragraph), ""]]


def definitions(paragraph: list[str]) -> list[str]:
    if not EXPLAINED.match(paragraph[0]) or not all(EXPLAINED.match(line) or line[0] == " " for line in paragraph):
        return paragraph
    defined: list[str] = []
    for line in paragraph:
        explained = EXPLAINED.match(line)
        defined += [f"``{explained[1]}``", f"    {explained[2]}"] if explained else [f"    {line.strip()}"]
    return defined


def keep_colons(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Prepend a comment to docstrings of attributes, because Napoleon takes text before the first colon for a type."""
    if what in ("attribute", "data", "property") and lines:
        lines[:0] = ["..", ""]


MEANT = {
    r"\bDevice\b": "torch.device | int | str",
    r"\bGroup\b": "ProcessGroup | DeviceMesh",
    r"<class 'gpipe\.module\._keywords\.NOTHING'>|\S*_rules\.NoValue\S*": "...",
    r"~?\bgpipe\.timeline\._costs\.": "~gpipe.simulate.",
    r"~?\bgpipe\.schedule\._schedule\.": "~gpipe.schedule.",
}
"""Private names, and the public text that signatures show instead."""

MADE_BY_FUNCTIONS = ("gpipe.Plan",)
"""Classes whose constructors are not for users."""


def show_public_names(
    app: Any, what: str, name: str, thing: object, options: Any, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Replace private names in a signature."""
    if name in MADE_BY_FUNCTIONS:
        return "", returned
    for private, public in MEANT.items():
        arguments = arguments and re.sub(private, public, arguments)
        returned = returned and re.sub(private, public, returned)
    return arguments, returned


def list_errors(app: Any, page: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def link_pages(app: Any, path: Path, page: str, source: list[str]) -> None:
    """Convert names of pages in the packages' READMEs to links. On a package index, such links would be broken."""
    if path.name == "README.md":  # its page is in docs/packages; MyST passes the last part of that page's name only
        source[0] = PAGE.sub(r"[`docs/\1`](../\1)", source[0])


def list_errors_anew(app: Any, env: Any, *changes: set[str]) -> set[str]:
    """Read the page in each build, since it depends on all sources."""
    return {"errors"} & set(env.found_docs)


def skip_aliases(app: Any, what: str, name: str, thing: object, skip: bool, options: Any) -> bool | None:
    """Skip the fields of named tuples, which are explained in their class."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None


def warn_of_lost_names(app: Any, env: Any, node: Any, text: Any) -> None:
    """Warn of unresolved Python references on pages. In the API reference, types of other packages have no entry."""
    if not node["refdoc"].startswith("api/"):
        node["refwarn"] = True


def box_pictures(app: Any, tree: nodes.document, page: str) -> None:
    """Put each picture into a box that scrolls on a narrow screen, so that it stays large enough to read."""
    for picture in list(tree.findall(nodes.image)):
        alone = isinstance(picture.parent, nodes.paragraph) and len(picture.parent) == 1
        box = nodes.container(classes=["picture"])
        (picture.parent if alone else picture).replace_self(box)
        box += picture


def setup(app: Any) -> None:
    app.add_directive("drawn", Drawn)
    app.connect("doctree-resolved", box_pictures)
    app.connect("autodoc-skip-member", skip_aliases)
    app.connect("autodoc-process-signature", show_public_names)
    app.connect("missing-reference", warn_of_lost_names)
    app.connect("source-read", list_errors)
    app.connect("include-read", link_pages)
    app.connect("env-get-outdated", list_errors_anew)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before Napoleon
    app.connect("autodoc-process-docstring", explain_names)
