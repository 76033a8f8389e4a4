"""The pages of the documentation as programs: what they show is run, and its types are checked, as it is printed.

python -m tests.pages FOLDER    # write the pages for newcomers there, as modules for type checkers
python -m tests.pages PAGE.md   # run that page
"""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("blockpartition", "microbatch", "streams", "profiler", "gpipe")
FRAMEWORKS = {"accelerate", "datasets", "lightning", "peft", "safetensors", "tokenizers", "transformers", "trl"}
"""Imports that only ``nox -s frameworks`` installs."""


def pages(*, frameworks: bool) -> list[Path]:
    """Return the pages that contain Python code, with or without imports of frameworks."""
    return [page for page in _pages() if imports_frameworks(page) == frameworks and not processes(page)]


def pages_of_processes(*, frameworks: bool) -> list[Path]:
    """Return the pages whose programs are for several processes, with or without imports of frameworks."""
    return [page for page in _pages() if imports_frameworks(page) == frameworks and processes(page)]


def processes(page: Path) -> int:
    """Return the number of processes in the torchrun command of a page's text, or 0."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.search(r"torchrun --nproc-per-node (\d+) train\.py", text)
    return int(found[1]) if found else 0


def _pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if blocks(page)]


def imports_frameworks(page: Path) -> bool:
    names = re.findall(r"^\s*(?:from|import) (\w+)", "\n".join(blocks(page)), re.MULTILINE)
    return not FRAMEWORKS.isdisjoint(names)


def blocks(page: Path) -> list[str]:
    """The blocks of Python on a page, each moved to the lines where it stands there, so that errors name those."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run(page: Path) -> str:
    """Run the blocks of a page in order, in one namespace.

    The comment below a statement that prints is the expected output, unless it begins with "such as". Returns all that
    is printed.
    """
    names: dict[str, object] = {"__name__": "__page__"}
    whole = ""
    for block in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), names)
        for promise in promises(block):
            assert promise in printed.getvalue()
        whole += printed.getvalue()
    return whole


def promises(block: str) -> list[str]:
    lines = block.splitlines()
    prints = [node for node in ast.parse(block).body if "print(" in ast.unparse(node)]
    below = [takewhile(lambda line: line.startswith("#"), lines[node.end_lineno :]) for node in prints]
    comments = ["\n".join(line.removeprefix("# ") for line in found) for found in below]
    return [comment for comment in comments if not comment.startswith("such as")]


def run_in_processes(page: Path, folder: Path) -> None:
    """Run a page with the command that it shows."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes(page))]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    subprocess.run(
        [sys.executable, *start, "-m", "tests.pages", str(page)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
    )


def write(folder: Path) -> None:
    """Write README, front page and tutorial as modules, with every line where it stands on its page."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "start").glob("*.md"))):
        program: list[str] = []
        for block in blocks(page):
            program += block.splitlines()[len(program) :]
        (folder / f"{page.stem.replace('-', '_').lower()}.py").write_text("\n".join(program) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(Path(sys.argv[1])) if sys.argv[1].endswith(".md") else write(Path(sys.argv[1]))
