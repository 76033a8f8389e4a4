"""A link of the documentation that leads nowhere fails its build, whatever kind of link it is.

Run by the session docs, where Sphinx is installed.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import PACKAGES, ROOT

LOST = {
    "document": "{doc}`lost-document`",
    "page": "[text](lost-page.md)",
    "place": "[text](other.md#lost-place)",
    "place-here": "[text](#lost-place-here)",
    "label": "{ref}`lost-label`",
    "function": "{func}`gpipe.lost_function`",
    "class": "{class}`gpipe.LostClass`",
    "term": "{term}`lost term`",
    "picture": "![text](lost-picture.svg)",
    "file": "[text](lost-file.py)",
}
FOUND = "{doc}`other`, [text](other.md#there), {func}`gpipe.schedule.found`, https://example.org"


def site(folder: Path, page: str) -> Path:
    (folder / "index.md").write_text(f"# Page\n\n{page}\n\n```{{toctree}}\nother\n```\n", encoding="utf-8")
    (folder / "other.md").write_text(
        "# Other\n\n## There\n\n```{py:function} gpipe.schedule.found()\n```\n", encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the warnings of a build of a page with all kinds of broken links, with the site's settings."""
    pytest.importorskip("myst_parser", reason="no site: Sphinx is not installed")
    folder = site(tmp_path_factory.mktemp("site"), "\n\n".join([FOUND, *LOST.values()]))
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(ROOT / "docs")]
    built = subprocess.run([*command, str(folder), str(folder / "html")], capture_output=True, text=True)
    assert built.returncode == 1
    return built.stderr


@pytest.mark.parametrize("kind", LOST)
def test_what_is_lost_fails_the_build(complaints: str, kind: str) -> None:
    line = 5 + 2 * list(LOST).index(kind)
    assert f"index.md:{line}: WARNING" in complaints


@pytest.mark.parametrize("package", PACKAGES)
def test_pages_named_in_readme_become_links(package: str) -> None:
    page = ROOT / "docs" / "_build" / "html" / "packages" / f"{package}.html"
    if not page.exists():
        pytest.skip("the site is not built: nox -s docs")
    readme = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`docs/([\w/-]+)\.md`", readme))
    assert named
    links = set(re.findall(r'href="\.\./([\w/-]+)\.html"', page.read_text(encoding="utf-8")))
    assert named <= links


def test_signatures_have_no_private_names() -> None:
    folder = ROOT / "docs" / "_build" / "html" / "api"
    if not folder.exists():
        pytest.skip("the site is not built: nox -s docs")
    html = "".join(page.read_text(encoding="utf-8") for page in folder.glob("*.html"))
    signatures = [re.sub("<.*?>", "", each) for each in re.findall(r'<dt class="sig.*?</dt>', html, re.DOTALL)]
    assert len(signatures) > 200
    assert not [each for each in signatures if re.search(r"(?<!\w)_[a-z]\w*|\b(Device|Group|NOTHING|NoValue)\b", each)]
