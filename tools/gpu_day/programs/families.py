"""Hugging Face models in two stages on GPUs: loss and gradients of a padded batch compared with the plain model's."""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext

import torch
from tests.frameworks.labelled import CASES, batch_of, made
from torch import Tensor, nn

from gpipe import GPipe
from microbatch import map_tensors

from .common import head, row, two_devices

ROWS, LARGEST = 7, 1e-4
"""Rows of a batch, and the largest difference of gradients in float32 relative to the largest gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families to run (default: all)")
    options = parser.parse_args()
    gpus, wrong = two_devices(), 0
    places = {"two stages there": gpus, "CPU first": [torch.device("cpu"), gpus[1]]}
    head("family", "stages", "precision", "loss, plain", "loss", "difference / largest gradient")
    for name in options.names or CASES:
        for where, devices in places.items():
            for precision in ("float32", "bfloat16 autocast") if devices is gpus else ("float32",):
                try:
                    plain, found, off = measured(name, devices, precision == "float32")
                except Exception as error:
                    words = str(error).partition("\n")[0].replace("|", "/")
                    row(name, where, precision, "–", f"{type(error).__name__}: {words}", "–")
                    wrong += 1
                    continue
                row(name, where, precision, f"{plain:.6f}", f"{found:.6f}", f"{off:.1e}")
                wrong += precision == "float32" and not (off < LARGEST and math.isclose(plain, found, rel_tol=1e-4))
    raise SystemExit(bool(wrong))


def measured(name: str, devices: list[torch.device], exact: bool) -> tuple[float, float, float]:
    """Both losses, and the largest difference of gradients relative to the largest gradient."""
    family, _ = CASES[name]
    model, plain = made(family._replace(dtype=torch.float32))
    plain.to(devices[-1])
    batch = map_tensors(single, batch_of(name, ROWS, "padded"))
    pipe = GPipe(model, devices=devices, chunks=3)
    kind = devices[-1].type
    with nullcontext() if exact else torch.autocast(kind, torch.bfloat16):
        expected = plain(**map_tensors(lambda tensor: tensor.to(devices[-1]), batch)).loss
        found = pipe.step(**map_tensors(lambda tensor: tensor.to(devices[0]), batch))
    expected.backward()
    own, theirs = gradients(model), gradients(plain)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    off = max(float((own[key] - gradient).abs().max()) for key, gradient in theirs.items()) / largest
    pipe.close()
    return expected.item(), found.item(), off


def single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.grad.cpu() for key, value in model.named_parameters() if value.grad is not None}


if __name__ == "__main__":
    main()
