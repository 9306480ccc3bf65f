"""How many KV blocks there will be, and how long a sequence may get: memory in, numbers out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError
from engine.runner.device import DeviceMemory

logger = logging.getLogger(__name__)

GIB = 1024**3
# What the pool leaves of the free memory, for activations and everything else that runs here.
_USABLE_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for the pool."""

    num_bytes: int
    origin: str  # in words


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """A device's memory with the weights loaded, and what the largest step needs beside them; bytes."""

    total: int
    free: int  # between steps
    step: int  # more that is taken while the largest step runs


def profile_memory(memory: DeviceMemory, step: Callable[[], None]) -> MemoryProfile:
    """Run `step`, the largest there will be, and see what it takes."""
    memory.release()
    before = memory.reserved()
    step()
    needed = memory.peak() - before
    memory.release()
    return MemoryProfile(memory.total(), memory.free(), needed)


def device_budget(profile: MemoryProfile, utilization: float, graph_share: float = 0.0) -> Budget:
    """What is left for the pool when `utilization` of the device's memory may be used in all, by whomever.

    Args:
        profile: measured.
        utilization: in (0, 1].
        graph_share: tokens of the largest captured graph per token of the profiled step: graphs keep their own memory.
    """
    in_use = profile.total - profile.free
    graphs = int(profile.step * graph_share)
    left = int(profile.total * utilization) - in_use - profile.step - graphs
    return Budget(
        left,
        f"--gpu-memory-utilization {utilization:g} of {profile.total / GIB:.2f} GiB, less {in_use / GIB:.2f} in use, "
        f"{profile.step / GIB:.2f} for a step and {graphs / GIB:.2f} for graphs",
    )


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The pool's size and the longest sequence."""

    num_blocks: int
    max_model_len: int


def plan_kv(
    *,
    bytes_per_block: int,
    block_size: int,
    model_max_len: int,
    max_model_len: int | None,
    kv_cache_memory_bytes: int,
    num_kv_blocks: int | None,
    free_bytes: int | None,
    budget: Budget | None = None,
) -> KvPlan:
    """Size the pool.

    Args:
        bytes_per_block: over all layers.
        block_size: tokens.
        model_max_len: what the model was made for, tokens.
        max_model_len: what the user asks for; None = the model's, shrunk to what fits, which is logged.
        kv_cache_memory_bytes: size of the pool, capped by free memory.
        num_kv_blocks: overrides the sizing by memory; then nothing is refused, only warned about.
        free_bytes: free memory; None = unknown, no cap.
        budget: a device's, instead of kv_cache_memory_bytes and free_bytes.

    Raises:
        StartupError: with what is needed, what there is, and the largest length that fits.
    """
    if max_model_len is not None and not 1 <= max_model_len <= model_max_len:
        raise StartupError(f"--max-model-len {max_model_len}: the model takes 1 to {model_max_len} tokens")
    if num_kv_blocks is not None:
        num_blocks, origin = num_kv_blocks, f"--num-kv-blocks {num_kv_blocks}"
        if num_blocks < 1:
            raise StartupError(f"--num-kv-blocks {num_kv_blocks}: at least one block is needed")
        if free_bytes is not None and num_blocks * bytes_per_block > free_bytes:
            logger.warning(
                "--num-kv-blocks %d takes %.2f GiB, %.2f GiB are free: the process may be killed once they are used",
                num_blocks, num_blocks * bytes_per_block / GIB, free_bytes / GIB,
            )  # fmt: skip
    else:
        budget = budget or _host_budget(kv_cache_memory_bytes, free_bytes)
        origin = budget.origin
        num_blocks = budget.num_bytes // bytes_per_block
        if num_blocks < 1:
            raise StartupError(
                f"the KV cache needs {bytes_per_block} bytes per block of {block_size} tokens and has "
                f"{max(0, budget.num_bytes)} ({origin}): not one block fits"
            )
    fitting = num_blocks * block_size
    wanted = model_max_len if max_model_len is None else max_model_len
    if wanted <= fitting:
        return KvPlan(num_blocks, wanted)
    needed = -(-wanted // block_size)
    if max_model_len is None:
        logger.warning(
            "max_model_len shrinks from the model's %d to %d tokens: %d blocks of %d fit (%s), %d would be needed",
            wanted, fitting, num_blocks, block_size, origin, needed,
        )  # fmt: skip
        return KvPlan(num_blocks, fitting)
    if num_kv_blocks is None:
        raise StartupError(
            f"--max-model-len {wanted} needs {needed} KV blocks of {block_size} tokens "
            f"({needed * bytes_per_block / GIB:.2f} GiB), there are {num_blocks} "
            f"({num_blocks * bytes_per_block / GIB:.2f} GiB; {origin}); the largest length that fits is {fitting}"
        )
    logger.warning(
        "--max-model-len %d needs %d KV blocks, --num-kv-blocks gives %d: requests over %d tokens will be refused",
        wanted, needed, num_blocks, fitting,
    )  # fmt: skip
    return KvPlan(num_blocks, wanted)


def _host_budget(asked: int, free_bytes: int | None) -> Budget:
    origin = f"--kv-cache-memory-bytes {asked}"
    if free_bytes is None or asked <= free_bytes * _USABLE_FRACTION:
        return Budget(asked, origin)
    capped = int(free_bytes * _USABLE_FRACTION)
    logger.warning(
        "KV cache: %.2f GiB asked for, %.2f GiB are free; taking %.2f GiB",
        asked / GIB, free_bytes / GIB, capped / GIB,
    )  # fmt: skip
    return Budget(capped, f"{origin}, capped by free memory at {capped}")


def free_memory() -> int | None:
    """Bytes this process may still take: the system's available memory, less where a cgroup allows less; None =
    unknown."""
    candidates = [_available(), _cgroup_rest()]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def _available() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _cgroup_rest() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() else None
