"""Builds the simulated device, once per version of its source and of PyTorch, outside the repository."""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "device"
NAME = "simulated_device"
FLAGS = ["-O1", "-g0", "-DNDEBUG"]  # as torch is built: its classes differ without NDEBUG


def load() -> ModuleType:
    """Load the device, and build it first if needed, which takes minutes and a C++ compiler."""
    library = _cache() / f"{NAME}.so"
    if not library.exists():
        _build(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler() -> str | None:
    """Return the path of the compiler to use, or None."""
    return shutil.which(os.environ.get("CXX") or "c++")


def _cache() -> Path:
    """Return a folder that is unique to everything the build depends on."""
    content = hashlib.sha256("\n".join([torch.__version__, sys.version, *FLAGS]).encode())
    for file in sorted(SOURCE.iterdir()):
        content.update(file.read_bytes())
    home = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gpipe" / f"simulated-{content.hexdigest()[:16]}"


def _build(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        cpp_extension.load(
            NAME,
            sources=[str(file) for file in sorted(SOURCE.glob("*.cpp"))],
            extra_cflags=FLAGS,
            build_directory=folder,
            is_python_module=False,
            verbose=True,
        )
        # Concurrent builds produce the same file, and the last one wins.
        Path(folder, library.name).replace(library)
