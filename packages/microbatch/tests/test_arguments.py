"""Several arguments as one value."""

import torch
from torch import Tensor

from microbatch import Arguments, Replicate, check, gather, scatter


def scaled(x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
    return x * mask * scale


def test_arguments_are_cut_together() -> None:
    x, mask = torch.randn(7, 3), torch.rand(7, 3)
    value = Arguments((x,), {"mask": mask, "scale": Replicate(2.0)})
    check(value)
    batches = scatter(value, 4)
    result = gather([batch.call(lambda given: scaled(*given.args, **given.kwargs)) for batch in batches])
    torch.testing.assert_close(result, scaled(x, mask=mask, scale=2.0))
    assert all(type(batch.value) is Arguments for batch in batches)


def test_they_are_a_spec_for_themselves() -> None:
    value = Arguments((torch.ones(4),), {"mask": torch.ones(3)})
    a, b = scatter(value, 2, Arguments((None,), {"mask": Replicate()}))
    assert a.value.kwargs["mask"] is b.value.kwargs["mask"]
