"""Packing a weight changes its layout, not the product."""

from __future__ import annotations

import pytest
import torch

from engine.models.layers import linear
from engine.models.layers.linear import Linear


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_is_the_plain_one(num_tokens: int, with_bias: bool) -> None:
    generator = torch.manual_seed(0)
    weight = torch.randn(50, 72, generator=generator).bfloat16()
    plain = Linear(weight, torch.randn(50, generator=generator).bfloat16() if with_bias else None)
    packed = plain.packed()
    assert packed.weight.is_mkldnn == linear.can_pack()
    x = torch.randn(num_tokens, 72, generator=generator).bfloat16()
    # Both sum in float32 and round once, in another order: one unit in the last place of bfloat16.
    torch.testing.assert_close(packed(x), plain(x), atol=2**-6, rtol=2**-7)


def test_where_packing_is_missing_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda: False)
    plain = Linear(torch.ones(2, 3))
    assert plain.packed() is plain
