"""Consistency of the five packages."""

import ast
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .pages import PACKAGES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

DISTRIBUTIONS = {name: f"gpipe-{'torch' if name == 'gpipe' else name}" for name in PACKAGES}

each_package = pytest.mark.parametrize("package", PACKAGES)


def sources(package: str) -> Path:
    return ROOT / "packages" / package / "src" / package


def project(package: str) -> dict:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


@each_package
def test_short_standalone_session_names_existing_file(package: str) -> None:
    found = re.search(r"^SHORT = (\{.*?^\})", (ROOT / "noxfile.py").read_text(), re.MULTILINE | re.DOTALL)
    assert (ROOT / f"packages/{package}/tests/test_{ast.literal_eval(found[1])[package]}.py").is_file()


def public_modules(package: ModuleType) -> list[str]:
    """Return the public submodules, which define ``__all__``."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    return [name for name in names if hasattr(importlib.import_module(f"{package.__name__}.{name}"), "__all__")]


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so the tracked files are unknown")
    return [file for name in listing.stdout.split("\0") if name and (file := ROOT / name).is_file()]


def lines_matching(pattern: str) -> list[str]:
    found = []
    for file in tracked_files():
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
            if re.search(pattern, line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


@each_package
def test_no_other_names_are_public(package: str) -> None:
    module = importlib.import_module(package)
    public = {name for name in vars(module) if not name.startswith("_")}
    inside = {each.name for each in pkgutil.iter_modules(module.__path__)}
    assert public - set(module.__all__) - inside == set()


@each_package
def test_everything_promised_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(module.__all__) == len(set(module.__all__))


@each_package
def test_the_reference_has_every_public_module(package: str) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob(f"{package}*.md"))
    modules = [package, *(f"{package}.{name}" for name in public_modules(importlib.import_module(package)))]
    assert [name for name in modules if f".. automodule:: {name}\n" not in pages] == []


@each_package
def test_types_are_shipped(package: str) -> None:
    assert (sources(package) / "py.typed").is_file()


@each_package
def test_installed_version_matches_sources(package: str) -> None:
    try:
        installed = importlib.metadata.version(DISTRIBUTIONS[package])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTIONS[package]} is not installed")
    assert installed == importlib.import_module(package).__version__


@each_package
def test_the_changelog_speaks_of_the_version(package: str) -> None:
    version = importlib.import_module(package).__version__
    changelog = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert re.search(rf"^## .*\b{re.escape(version)}\b", changelog, re.MULTILINE)


@each_package
def test_the_distribution_has_its_own_name(package: str) -> None:
    assert project(package)["name"] == DISTRIBUTIONS[package]


@each_package
def test_what_is_imported_is_exactly_what_is_declared(package: str) -> None:
    imports = {DISTRIBUTIONS.get(name, name) for name in third_party_imports(package)}
    required = names_of(project(package)["dependencies"])
    extras = project(package).get("optional-dependencies", {}).values()
    optional = set().union(*map(names_of, extras))
    assert imports - optional == required


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ \[;]", need)[0] for need in requirements}


def third_party_imports(package: str) -> set[str]:
    roots = set()
    for file in sources(package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots.add(str(node.module).split(".")[0])
    return roots - set(sys.stdlib_module_names) - {package}


def test_nobody_is_told_to_install_a_stranger() -> None:
    assert lines_matching(r"\binstall\s+(?:-\S+\s+)*[\"']?(?:gpipe|profiler|streams|microbatch)(?![-\w/])") == []
    assert lines_matching(r"\binstall\s+(?:-\S+\s+)*[\"']?gpipe-\w") == []


def test_no_file_knows_a_machine_or_an_index() -> None:
    machine = r"(?<![\w.~/-])/(?:work|tmp|root|home|opt|mnt)/\w"
    index = r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org"
    assert lines_matching(f"{machine}|{index}") == []


@each_package
def test_readmes_need_no_other_file(package: str) -> None:
    """An index shows the README of a package away from its repository: no pictures, no links to files."""
    text = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    outside_code = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"!\[|\]\((?!https?://|#)[^)]*\)", outside_code) == []


@each_package
def test_readmes_name_pages_that_are_there(package: str) -> None:
    text = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    assert [page for page in re.findall(r"`(docs/[^`]+)`", text) if not (ROOT / page).exists()] == []


@each_package
def test_the_licence_is_the_same_everywhere(package: str) -> None:
    assert (ROOT / "packages" / package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
