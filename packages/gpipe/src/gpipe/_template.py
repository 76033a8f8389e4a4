"""HTML pages from templates, which contain names of parts in double braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files


def filled(package: str, parts: Mapping[str, str]) -> str:
    """The ``_page.html`` of ``package``, with the names in braces replaced by ``parts``.

    Braces inside the parts are not replaced.

    Args:
        package: the name of a package, as in ``__package__``.
        parts: HTML, for each name in the template.

    Returns:
        HTML.
    """
    template = files(package).joinpath("_page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], template)
