"""Operations that are given a generator do what torch's do with the numbers of its own."""

import pytest
import torch

from gpipe.checkpoint._operations import with_generator


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_is_that_of_torch(p: float, dtype: torch.dtype) -> None:
    """Torch's own takes no generator."""
    x = torch.linspace(-3, 3, 60, dtype=dtype).view(4, 15).requires_grad_()
    torch.manual_seed(5)
    expected = torch.native_dropout(x, p, True)
    call = with_generator(torch.ops.aten.native_dropout.default)
    assert call is not None
    found = call(x, p, True, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.arange(60, dtype=dtype).view(4, 15)
    one, other = (torch.autograd.grad(output, x, weights)[0] for output, _ in (found, expected))
    torch.testing.assert_close(one, other)  # torch multiplies in another order
