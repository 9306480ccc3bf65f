"""How far a kernel may be from the float32 reference, by the type of its output."""

from __future__ import annotations

import torch

# Sums in another order; the output's rounding and that of a softmax's weights, half a unit in the last place each, with
# a factor of two to spare.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_close_only_to(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> None:
    """`got` is `expected` to within its type's tolerance, and that tolerance is tight enough to reject `wrong`."""
    tolerance = TOLERANCE[got.dtype]
    assert torch.isfinite(got).all(), "not everything was written"
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)
    assert not torch.allclose(got.float(), wrong.float(), atol=tolerance, rtol=tolerance), "the tolerance can't fail"
