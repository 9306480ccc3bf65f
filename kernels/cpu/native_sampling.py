"""Choosing tokens natively; see `kernels.reference.sampling` and native/sampling.h."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kernels.cpu.native import NativeKernels

# PagedeckSample of native/api.h.
OPTIONS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("uniform", np.float64),
    ],
    align=True,
)


@lru_cache(maxsize=1)
def _kernels(threads: int) -> NativeKernels:
    return NativeKernels(threads)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.argmax`."""
    return _kernels(torch.get_num_threads()).sample(logits.contiguous(), None)


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.all_finite`."""
    return _kernels(torch.get_num_threads()).check_finite(logits.contiguous())


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.reference.sampling.sample`."""
    options = np.empty(logits.shape[0], dtype=OPTIONS)
    options["temperature"], options["top_k"], options["top_p"] = temperature.numpy(), top_k.numpy(), top_p.numpy()
    options["min_p"], options["uniform"] = min_p.numpy(), uniform.numpy()
    return _kernels(torch.get_num_threads()).sample(logits.contiguous(), options)
