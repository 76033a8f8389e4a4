"""Whether the links of a built site lead somewhere: to a file that is there, and to a place in it.

python -m tests.links FOLDER    # names each link that does not, and ends with status 1
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A page of a site: what it links to, and the places that others may link to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {place for name in ("id", "name") if (place := given.get(name))}
        self.links |= {link for name in ("href", "src") if (link := given.get(name))}


def broken(folder: Path) -> list[str]:
    """The links inside of the site that lead nowhere, each with its page."""
    pages = {file.resolve(): Page(file) for file in sorted(folder.rglob("*.html"))}
    return [
        f"{file.relative_to(folder.resolve())}: {link}"
        for file, page in pages.items()
        for link in sorted(page.links)
        if not leads_somewhere(link, file, pages)
    ]


def leads_somewhere(link: str, file: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True  # Out of the site: not looked at, since that needs a network.
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if not target.is_file():
        return False
    return not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].places


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]))
    print(*found, sep="\n")
    sys.exit(bool(found))
