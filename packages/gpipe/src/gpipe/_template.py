"""Pages from templates, which have the names of their parts in double braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files


def filled(package: str, parts: Mapping[str, str]) -> str:
    """The ``_page.html`` of ``package``, with ``parts`` in the place of their names.

    What braces in the parts say is left as it is.

    Args:
        package: its name, as in ``__package__``.
        parts: HTML, for each name in the template.

    Returns:
        HTML.
    """
    template = files(package).joinpath("_page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], template)
