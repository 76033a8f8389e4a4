"""Lists in reference pages match the code."""

import ast
import re
from collections.abc import Iterator

from hypothesis import settings

from .pages import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def texts_in_sources() -> Iterator[str]:
    for file in (ROOT / "packages").glob("*/src/**/*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from (
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )


def variables_read() -> set[str]:
    """Return the names of our environment variables, and of others that are read by a literal name."""
    direct = re.compile(r"environ(?:\.get\(|\[)\"(\w+)\"|getenv\(\"(\w+)\"")
    files = (ROOT / "packages").glob("*/src/**/*.py")
    named = {
        name for file in files for found in direct.findall(file.read_text(encoding="utf-8")) for name in found if name
    }
    return named | {text for text in texts_in_sources() if re.fullmatch(r"GPIPE_[A-Z_]+", text)}


def test_the_environment_variables_are_those_that_are_read() -> None:
    for_users = page("environment").partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", for_users, re.MULTILINE)) == variables_read()


def test_number_of_examples_matches_page() -> None:
    (fixed,) = re.findall(r"\*\*same (\d+) examples\*\*", page("testing"))
    assert settings.get_profile("fixed").max_examples == int(fixed)


def test_the_glossary_is_in_order() -> None:
    """Digits, then letters, as a reader looks for them."""
    terms = re.findall(r"^(\w.*)$", page("glossary").partition("```{glossary}")[2], re.MULTILINE)
    assert len(terms) > 30
    assert terms == sorted(terms, key=str.lower)
