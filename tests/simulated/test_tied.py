"""Parameters that stages on several devices share: no races, and as in the plain model."""

import copy

import torch
from packages.gpipe.tests.layers import Layer, Tied
from torch import nn

from gpipe import GPipe

from .models import WIDTH, assert_trains_like, linear
from .placements import devices


def scaled() -> nn.Module:
    """Return a layer with a parameter, and a constant buffer."""
    scale = torch.arange(WIDTH, dtype=torch.float64)
    return Layer(lambda s, x: torch.tanh(s.m[0](x)) * s.scale, linear(), scale=scale)


def model() -> nn.Sequential:
    """Six layers with ties between the first and the last three: of weights, a bias and a module."""
    torch.manual_seed(0)
    first, second, shared = linear(), linear(), scaled()
    second.bias = first.bias
    layers = [first, nn.Sequential(shared), second, nn.Sequential(shared, Tied(second)), linear()]
    return nn.Sequential(*layers, Tied(first))


def test_shared_buffer_stays_with_first_layer():
    mask = torch.arange(WIDTH, dtype=torch.float64)
    first, last = (Layer(lambda s, x: x * s.mask, mask=mask) for _ in range(2))
    layers = nn.Sequential(first, linear(), last)
    pipe = GPipe(copy.deepcopy(layers), [1, 1, 1], devices=devices("three devices"), chunks=3)
    assert pipe[0].mask is pipe[2].mask
    assert pipe[0].mask.device == pipe.devices[0]
    assert_trains_like(layers, pipe, "1f1b", "own")


def test_tied_owners_on_several_devices():
    first, second = linear(), linear()
    layers = nn.Sequential(first, second, nn.Sequential(Tied(first), Tied(second)))
    pipe = GPipe(copy.deepcopy(layers), [1, 1, 1], devices=devices("three devices"), chunks=3)
    assert_trains_like(layers, pipe, "call", "own")
