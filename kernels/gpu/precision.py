"""Rounding and products that give the same numbers on a device and interpreted.

Triton's interpreter (TRITON_INTERPRET=1 when a kernel is defined) computes with numpy, which has no bfloat16: it cuts
off the lower bits where a device rounds to nearest even, and multiplies matrices of bit patterns. These two functions
are the places where the kernels know of it; on a device they are the plain conversion and the plain product.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 `x` rounded to nearest even in `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b):
    """`a @ b` with float32 sums; float32 factors are not rounded to TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")
