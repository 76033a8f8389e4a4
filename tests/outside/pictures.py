"""Models of timm, one or two of each module of it, as small as their settings let them be, with random weights."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import Arguments

from ..own_forward import Case, NotComparableError, of_all_rows

timm = pytest.importorskip("timm", reason="timm is not installed; see nox -s outside")

ROWS, CLASSES, MOST = 6, 5, 40_000_000
SIZES = (64, 96, 128, 224, 256)
SMALL = {"depth": 3, "embed_dim": 48, "num_heads": 3}
"""Keyword arguments of transformers, if the model takes them."""
SIZE_WORDS = ("nano", "pico", "femto", "atto", "xxs", "tiny", "xs", "small", "_s", "18", "b0", "050", "lite")
_PLAIN = re.compile(r"(test_|_clip|_in21k|_dino|quickgelu|huge|giant|large|gigantic|_384|_512)")


def names() -> list[str]:
    """The two smallest-sounding architectures of each module of timm, and the tiny ones that it has for tests."""
    found = list(timm.list_models("test_*"))
    for module in timm.models.list_modules():
        models = [name for name in timm.list_models(module=module) if not _PLAIN.search(name)]
        rated = sorted(models, key=lambda name: (not any(word in name for word in SIZE_WORDS), len(name), name))
        found += [name for name in rated[:2] if name not in found]
    return found


def case(name: str) -> Case:
    """A model that takes the smallest pictures that it can."""
    for settings in (SMALL, {}):
        try:
            return Case(*_made(name, settings), loss=of_all_rows, bound=1e-3)
        except (TypeError, RuntimeError, AssertionError, ValueError, NotComparableError):
            continue
    raise NotComparableError(f"{name} takes no pictures of {SIZES}")


def _made(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Arguments]:
    for size in SIZES:
        for more in ({"img_size": size}, {}):
            torch.manual_seed(0)
            try:
                model = timm.create_model(name, num_classes=CLASSES, **settings, **more)
            except (TypeError, AssertionError, RuntimeError, ValueError, ZeroDivisionError):
                continue
            if sum(parameter.numel() for parameter in model.parameters()) > MOST:
                raise NotComparableError(f"{name} is too large")
            channels = getattr(model, "in_chans", None) or timm.get_pretrained_cfg(name).input_size[0]
            pictures = torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(1))
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
                for attribute in ("drop_prob", "drop_rate"):
                    if isinstance(getattr(module, attribute, None), float):
                        setattr(module, attribute, 0.0)
            try:
                with torch.no_grad():
                    model.eval()(pictures[:1])
                    _settle(model, pictures)
            except Exception:
                continue
            return model.train(), Arguments((pictures,), {})
    raise NotComparableError(f"{name} takes no pictures of {SIZES}")


def _settle(model: nn.Module, pictures: torch.Tensor) -> None:
    """Set batch norm statistics from these pictures; with initial ones, values of deep models vanish."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(pictures)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
