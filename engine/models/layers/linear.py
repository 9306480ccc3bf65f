"""A matrix product with weights that stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.cpu.native import StoredMatrix


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`."""

    weight: torch.Tensor  # [out_features, in_features]; opaque if it was packed
    bias: torch.Tensor | None = None  # [out_features]
    stored: StoredMatrix | None = None  # the weight as its file holds it, where that was asked for

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, in_features]` -> `[num_tokens, out_features]`."""
        if self.weight.is_mkldnn:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed
        return F.linear(x, self.weight, self.bias)

    def packed(self) -> Linear:
        """The same product with the weight in oneDNN's own layout, where this build of PyTorch can do that.

        A plain weight is put into that layout again by every call, which costs a third of a step of few rows. These are
        the operations that PyTorch's own compiler emits for frozen weights; where they are missing, nothing changes.
        """
        if not can_pack():
            return self
        return Linear(torch.ops.mkldnn._reorder_linear_weight(self.weight, None), self.bias)


def can_pack() -> bool:
    """Whether this build of PyTorch has oneDNN and lets weights be packed for it."""
    operations = ("_reorder_linear_weight", "_linear_pointwise")
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_built and all(hasattr(torch.ops.mkldnn, name) for name in operations)
