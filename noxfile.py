"""The nox sessions of the repository.

python -m pip install "nox[uv]"
python -m nox -s demo        # train a real model through a pipeline
python -m nox                # tests, lint, types
python -m nox --list         # everything else
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

# uv ignores pip's variables. Without this one, it does not find the wheels that pip finds.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])

ROOT = Path(__file__).parent
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("blockpartition", "microbatch", "streams", "profiler", "gpipe")
TORCH_VERSIONS = ("2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
SHORT = {
    "blockpartition": "solve",
    "microbatch": "scatter",
    "streams": "workers",
    "profiler": "profile",
    "gpipe": "any_order",
}
"""The tests of each package that the short form of ``standalone`` runs."""
KINDS = ("GPT-2", "Llama", "Mixtral", "Mamba", "BART", "ViT", "DeBERTa", "tokens", "answers", "Wav2Vec2", "CLIP")
SHORT_FRAMEWORKS = f"trainer and not losses_are or pages or in_two or losses_are and ({' or '.join(KINDS)})"
"""The tests that the short form of ``frameworks`` runs of its files."""
# Three processes on two cores, as tests sometimes wait for processes and threads.
THREE = ("--numprocesses", "3", "--dist", "worksteal")
SEARCH = {"--examples": 2_000, "--seconds": 60}
EVERYTHING = ("lint", "types", "docs", "typing", "tests", "frameworks", "search", "accelerator", "distributed")
EVERYTHING += ("examples", "browser", "standalone")
SHORTER = {"search": ("--", "--seconds=5")}
"""Arguments that let a session of ``everything`` finish within an hour."""
SOURCES = [f"packages/{name}/src" for name in PACKAGES]
EDITABLE = [argument for name in PACKAGES for argument in ("-e", f"packages/{name}")]
SETTINGS = nox.project.load_toml(ROOT / "pyproject.toml")


@nox.session
def demo(session: nox.Session) -> None:
    """Profile, balance and train a residual network on two stages; arguments are passed to examples/digits.py."""
    install_all(session, "demo")
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every program in examples/; arguments select some of them, such as finetune."""
    install_all(session, "demo", "frameworks")
    for program in session.posargs or sorted(path.stem for path in (ROOT / "examples").glob("[!_]*.py")):
        command = [f"examples/{program}.py"]
        session.run("python", *command)
        if program == "train_distributed":  # and again with one process per stage
            session.run("torchrun", "--nproc-per-node", "2", *command)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every quick test that needs no GPU, in three processes; arguments are passed to pytest instead."""
    install_all(session, "all-tests")
    session.run("pytest", *(session.posargs or THREE))


@nox.session
def search(session: nox.Session) -> None:
    """Test every property on 2,000 random examples, or for a minute, in two hours; failures print how to repeat them.

    Arguments are package names or options of pytest, as in ``-- gpipe --seconds=600`` or ``-- --hypothesis-seed=7``.
    """
    install_all(session, "all-tests")
    arguments = [f"packages/{each}/tests" if each in PACKAGES else each for each in session.posargs]
    for option, value in {**SEARCH, "--hypothesis-seed": random.randrange(2**32)}.items():
        if not any(each.startswith(option) for each in arguments):
            arguments.append(f"{option}={value}")
    session.run("pytest", "--timeout=7200", *THREE, *arguments)


@nox.session(venv_backend="none")
def everything(session: nox.Session) -> None:
    """Run all sessions that need no GPU, two at a time, and print a table; arguments select some of them.

    The search takes 5 seconds per property.
    """
    with ThreadPoolExecutor(2) as two:  # half of the sessions use a single core
        rows = [*two.map(partial(outcome, session), session.posargs or EVERYTHING)]
    session.log("session        passed  failed  minutes")
    for name, passed, failed, minutes, _ in rows:
        session.log(f"{name:<14} {passed:>6} {failed:>7} {minutes:>8.1f}")
    wrong = [name for name, *_, ended in rows if ended]
    if wrong:
        session.error(f"failed: {', '.join(wrong)}")


@nox.session
def distributed(session: nox.Session) -> None:
    """Run all tests of stages in several processes, including long ones; arguments are passed to pytest instead."""
    install_all(session, "all-tests")
    every = sorted(ROOT.glob("packages/gpipe/tests/**/test_*.py"))
    files = [str(path) for path in every if path.parent.name == "distributed" or "worlds" in path.read_text()]
    pages = "tests/test_pages.py::test_a_page_for_several_processes_runs_as_printed"
    whole = [*THREE, "-m", "(long or not long) and not cuda", *files, pages]
    session.run("pytest", *(session.posargs or whole))


@nox.session
def soak(session: nox.Session) -> None:
    """Train 2,000 steps on 1 to 4 processes that are killed and restarted; compare with an unbroken run.

    ``-- short`` trains 200 steps in three minutes; other arguments go to the module, as in ``-- --seed 7``.
    """
    install_all(session, "all-tests")
    session.run("python", "-m", "packages.gpipe.tests.distributed.soak", *chosen(session, ["--steps", "200"], []))


@nox.session(name="tests-cuda")
def tests_cuda(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; skipped if there is none."""
    if shutil.which("nvidia-smi") is None:
        session.skip("no CUDA device: this machine has no NVIDIA driver (nvidia-smi is not on the path)")
    install_all(session, "all-tests")
    if not sees_cuda(session):
        session.skip("no CUDA device: torch.cuda.is_available() is False; is this a CPU build of torch?")
    session.run("pytest", "-m", "cuda", *session.posargs)


@nox.session
def accelerator(session: nox.Session) -> None:
    """Test pipelines on a simulated accelerator, which checks the order of all work; skipped without a C++ compiler.

    The first run builds it in a few minutes and caches it in ~/.cache/gpipe. ``-- short`` runs some cases of each kind;
    other arguments are passed to pytest.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        session.skip("no simulated accelerator: no C++ compiler (c++, or the one in CXX) is on the path")
    session.log(f"the C++ compiler is {compiler}")
    install_all(session, "accelerator")
    session.run("pytest", *chosen(session, ["tests/simulated"], ["tests/simulated", "-m", "long or not long"]))


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def standalone(session: nox.Session, package: str) -> None:
    """Test a package's wheel with only its declared dependencies installed, outside the source tree.

    ``-- short`` runs a few properties; other arguments are passed to pytest.
    """
    folder = empty_folder(Path(session.create_tmp()) / "standalone")
    wheels = [build_wheel(session, name, folder / name) for name in with_siblings(package)]
    install(session, *wheels, *group("test"))

    # Use the same relative paths as in the repository, so that tests and settings work unchanged. Some tests use
    # helpers from a sibling's tests.
    for name in with_siblings(package):
        shutil.copytree(ROOT / "packages" / name / "tests", folder / "packages" / name / "tests")
    for shared in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / shared, folder)
    session.chdir(folder)
    tests = f"packages/{package}/tests"
    short = [f"{tests}/test_{SHORT[package]}.py"]
    session.run("pytest", "-o", "pythonpath=.", *chosen(session, short, [tests]), env={"PYTHONPATH": ""})


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, style, and the direction of imports."""
    install(session, *group("lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(SOURCES)})


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all five packages with mypy in strict mode, and the names that benchmarks use."""
    install_all(session, "types")
    session.run("mypy", "--strict", *SOURCES, "benchmarks")


@nox.session
def typing(session: nox.Session) -> None:
    """Check the examples with mypy, and the code in README, front page and tutorial with mypy and pyright."""
    install_all(session, "typing", "demo")
    folder = empty_folder(Path(session.create_tmp()) / "pages")
    session.run("python", "-m", "tests.pages", str(folder))
    # PyTorch's functions are not all typed, and scikit-learn has no types.
    mypy = ("mypy", "--strict", "--allow-untyped-calls", "--disable-error-code=import-untyped")
    session.run(*mypy, str(folder))
    session.run(*mypy, "examples")
    # A build of pyright that includes Node, and so downloads nothing.
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    session.run("basedpyright", "--level", "error", "-p", str(folder), "--pythonpath", session.bin + "/python")


@nox.session
def build(session: nox.Session) -> None:
    """Build a source archive, a wheel and an SBOM of each package in dist/, ready to upload to an index."""
    install(session, *group("build"))
    dist = empty_folder(ROOT / "dist")
    for name in PACKAGES:
        session.run("uv", "build", "--build-constraints", "constraints.txt", "--out-dir", dist, f"packages/{name}")
    archives = sorted(dist.glob("gpipe_*"))
    session.run("twine", "check", "--strict", *map(str, archives))
    for name, wheel in zip(sorted(PACKAGES, key=distribution), sorted(dist.glob("*.whl")), strict=True):
        list_dependencies(session, name, dist / f"{wheel.stem.removesuffix('-py3-none-any')}.cdx.json")


@nox.session
def changelog(session: nox.Session) -> None:
    """Print the next changelog entries; with package names, as in ``-- gpipe``, write them to the changelogs."""
    install(session, *group("changelog"))
    how = "--yes" if session.posargs else "--draft"
    for name in session.posargs or PACKAGES:
        session.run("towncrier", "build", "--config", "pyproject.toml", "--dir", f"packages/{name}", how)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in docs/_build/html; fail on warnings and broken internal links."""
    install_all(session, "docs")
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
    session.run("pytest", "tests/test_site.py")


@nox.session
def long(session: nox.Session) -> None:
    """Run the tests that are too slow for daily use; arguments are passed to pytest."""
    install_all(session, "all-tests")
    session.run("pytest", "-m", "long", "--timeout=7200", *session.posargs)


@nox.session
def interleavings(session: nox.Session) -> None:
    """Try every order of events of small pipes, with failures and interrupts, and plant faults of order.

    ``-- short`` tries a few orders of each program; other arguments go to python -m packages.gpipe.tests.interleavings.
    """
    install_all(session, "all-tests")
    program = "packages.gpipe.tests.interleavings"
    session.run("python", "-m", program, *chosen(session, ["--most", "10"], ["--most", "200"]))
    if not session.posargs:
        session.run("python", "-m", program + ".interrupted")
        session.run("python", "-m", program + ".processes")
        session.run("python", "-m", program + ".planted")


@nox.session
def frameworks(session: nox.Session) -> None:
    """Test pipelines in third-party trainers: transformers, accelerate, Lightning, peft.

    ``-- short`` runs the trainer of transformers, which uses most features of a pipe, with some models, the code in the
    pages, and the example for several processes; other arguments are passed to pytest.
    """
    install_all(session, "frameworks", "demo")
    short = [f"tests/frameworks/test_{name}.py" for name in ("trainer", "pages", "examples")]
    short += ["-k", SHORT_FRAMEWORKS]
    session.run("pytest", *chosen(session, short, ["tests/frameworks"]))


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests of ``frameworks`` with the newest release of each library; arguments are passed to pytest instead.

    Version bounds in pyproject.toml are ignored, and packages from an earlier run are upgraded.
    """
    keep_bytecode(session)
    unbounded = [re.sub("^([^<>=!~;]+)[^;]*", r"\1", each) for each in group("frameworks", "demo", "neighbours")]
    session.install("--upgrade", "-c", "constraints.txt", *EDITABLE, *unbounded)
    session.run("python", "-m", "tests.frameworks.versions", *(each.split(";")[0].strip() for each in unbounded))
    session.run("pytest", *(session.posargs or ["tests/frameworks"]))


@nox.session
def outside(session: nox.Session) -> None:
    """Compare models of timm and diffusers, and adapters of PEFT, with the plain models, in half an hour.

    If TRANSFORMERS_REPOSITORY names a checkout of its repository, models of transformers' own tests are also compared,
    which takes an hour more; the tests need a similar version of the package. Arguments are passed to pytest.
    """
    install_all(session, "outside")
    # The tests of transformers have markers of their own.
    session.run("pytest", "-o", "strict=false", "-o", "strict_markers=false", *(session.posargs or ["tests/outside"]))


@nox.session(name="torch-versions")
@nox.parametrize("version", TORCH_VERSIONS, ids=TORCH_VERSIONS)
def torch_versions(session: nox.Session, version: str) -> None:
    """Run all tests with a different PyTorch, each in its own environment; CUDA builds take several GB each."""
    install_with(session, version, "all-tests")
    session.run("pytest", *session.posargs)


@nox.session
def mutation(session: nox.Session) -> None:
    """Plant 30 small faults, one at a time, which tests should find; arguments are passed to python -m tests.mutation.

    For example ``-- --sample 100 blockpartition gpipe/schedule``.
    """
    install_all(session, "all-tests")
    session.run("python", "-m", "tests.mutation", *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """Test timelines in a real browser; skipped without Chromium."""
    if not any(map(shutil.which, CHROMIUMS)):
        session.skip(f"no browser: none of {', '.join(CHROMIUMS)} is on the path")
    install_all(session, "browser")
    session.run("pytest", "tests/browser", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark and write docs/benchmarks; arguments are passed to python -m benchmarks."""
    install_all(session, "bench")
    session.run("python", "-m", "benchmarks", *(session.posargs or ["--write"]))


@nox.session(name="bench-torch")
@nox.parametrize("version", TORCH_VERSIONS, ids=TORCH_VERSIONS)
def bench_torch(session: nox.Session, version: str) -> None:
    """Compare ranks with the runtime of a different PyTorch; arguments are passed to python -m benchmarks."""
    install_with(session, version, "bench")
    session.run("python", "-m", "benchmarks", *(session.posargs or ["ranks", "--write"]))


def install(session: nox.Session, *what: str | Path) -> None:
    keep_bytecode(session)
    session.install("-c", "constraints.txt", *map(str, what))


def install_all(session: nox.Session, *groups: str) -> None:
    """Install all five packages in one call, so that no sibling is searched on a package index."""
    install(session, *EDITABLE, *group(*groups))


def install_with(session: nox.Session, torch: str, *groups: str) -> None:
    """Install all five packages with a different PyTorch than constraints.txt pins."""
    keep_bytecode(session)
    session.install(f"torch=={torch}", *EDITABLE, *group(*groups))


def keep_bytecode(session: nox.Session) -> None:
    """Let Python cache bytecode in the session's folder, even if PYTHONDONTWRITEBYTECODE is set.

    Container images often set it. Then every process would compile PyTorch again, which takes longer than many tests.
    """
    folder = Path(session.virtualenv.location).resolve() / "bytecode"
    session.env.update({"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)})


def group(*names: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(SETTINGS, *names)


def with_siblings(package: str) -> list[str]:
    """Return the package and its declared siblings. Each package also declares its indirect dependencies."""
    project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
    declared = [need.removeprefix("gpipe-").split(">=")[0] for need in project["dependencies"]]
    return [package, *(name for name in PACKAGES if name in declared)]


def build_wheel(session: nox.Session, package: str, folder: Path) -> Path:
    source = ROOT / "packages" / package
    session.run("uv", "build", "--wheel", "--build-constraints", "constraints.txt", "--out-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def distribution(package: str) -> str:
    return str(nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]["name"])


def list_dependencies(session: nox.Session, package: str, file: Path) -> None:
    """Write the declared dependencies of a package in CycloneDX format."""
    settings = ROOT / "packages" / package / "pyproject.toml"
    needs = Path(session.create_tmp()) / "needs.txt"
    needs.write_text("\n".join(nox.project.load_toml(settings)["project"].get("dependencies", [])))
    flags = ("--mc-type", "library", "--output-reproducible", "--pyproject", str(settings), "-o", str(file))
    session.run("cyclonedx-py", "requirements", str(needs), *flags)


def empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def chosen(session: nox.Session, short: Sequence[str], whole: Sequence[str]) -> Sequence[str]:
    """Return the arguments to run: ``whole``, ``short`` for ``-- short``, or the session's other arguments."""
    if session.posargs == ["short"]:
        return short
    return session.posargs or whole


def outcome(session: nox.Session, name: str) -> tuple[str, int, int, float, int]:
    """Run a session. Return its name, the numbers of passed and failed tests, the minutes, and the exit status."""
    begin, passed, failed = time.monotonic(), 0, 0
    session.log(f"nox -s {name}")
    command = [sys.executable, "-m", "nox", "--no-error-on-missing-interpreters", "-s", name, *SHORTER.get(name, ())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name}: {line}", end="", flush=True)
            if re.search(r" in [\d.]+s", line):  # the last line of pytest
                passed += sum(map(int, re.findall(r"(\d+) passed", line)))
                failed += sum(map(int, re.findall(r"(\d+) (?:failed|errors?)", line)))
    return name, passed, failed, (time.monotonic() - begin) / 60, process.returncode


def sees_cuda(session: nox.Session) -> bool:
    answer = session.run("python", "-c", "import torch; print(torch.cuda.is_available())", silent=True)
    return "True" in str(answer)
