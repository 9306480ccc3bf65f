"""From a configuration to a runner: finds the device and the model, loads it, sizes the KV pool."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import perf_counter

import torch

from engine.attention.backend import AttentionBackend, choose_backend
from engine.config import EngineConfig, ModelInfo
from engine.errors import StartupError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderWeights
from engine.models.native import pack_weights, why_not_native
from engine.runner.cuda_graphs import Recorder
from engine.runner.device import Device, choose_device, choose_device_dtype
from engine.runner.device_loading import load_on_device
from engine.runner.forward import Forward, NativeForward, TorchForward
from engine.runner.kv_memory import GIB, Budget, KvPlan, free_memory, plan_kv
from engine.runner.model_runner import ModelRunner
from engine.runner.sampler import Sampler
from engine.runner.transfer import DeviceLink
from engine.weights.checkpoint import resolve_model
from engine.weights.loader import load_weights, open_checkpoint
from kernels.cpu.native import NativeKernels
from kernels.layout import KVLayout, allocate

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIRST_ROWS = 64  # the row table doubles when more run at once


def load_runner(config: EngineConfig, *, recorder: Recorder | None = None) -> ModelRunner:
    """Load the model that `config` names and allocate its KV pool, once and for all.

    Args:
        config: the engine's.
        recorder: of graphs, where the Triton kernels run; None = the device's own.

    Raises:
        StartupError: the model can't be found, read or computed here, or its KV cache doesn't fit as asked for.
    """
    begin = perf_counter()
    if config.block_size < 1:
        raise StartupError(f"--block-size {config.block_size}: at least one token")
    device = choose_device(config.device)
    threads = config.threads or usable_cores()
    torch.set_num_threads(threads)
    checkpoint = resolve_model(config.model)
    loaded = open_checkpoint(checkpoint)
    model = loaded.config
    dtype, dtype_reason = choose_dtype(config.dtype, device, loaded.stored_dtype)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _named_dtype("--kv-cache-dtype", config.kv_cache_dtype)
    max_len = model.max_position_embeddings if config.max_model_len is None else config.max_model_len
    obstacle = why_not_native(model, loaded.source.names(), dtype, kv_dtype, max_len)
    backend_name, backend_reason = choose_backend(config.attention_backend, device.kind, obstacle)
    if config.deterministic and backend_name != "native":
        raise StartupError(f"--deterministic: only native kernels promise it, not {backend_name} ({backend_reason})")
    # float32 stays on the plain path, whose results the tests hold against transformers'.
    is_native, is_bfloat16, is_triton = backend_name == "native", dtype == torch.bfloat16, backend_name == "triton"
    weights = load_weights(
        loaded.source, model, dtype, device=device.kind,
        is_packed=is_bfloat16 and not is_native and not is_triton, keep_stored=is_bfloat16 and is_native,
    )  # fmt: skip
    layout = KVLayout(model.num_kv_heads, config.block_size, model.head_dim)
    bytes_per_block = layout.bytes_per_block(model.num_layers, kv_dtype)

    def size_pool(budget: Budget | None = None) -> KvPlan:
        return plan_kv(
            bytes_per_block=bytes_per_block,
            block_size=config.block_size,
            model_max_len=model.max_position_embeddings,
            max_model_len=config.max_model_len,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            num_kv_blocks=config.num_kv_blocks,
            free_bytes=free_memory(),
            budget=budget,
        )

    quantization = loaded.source.quantization(_name_of(dtype))
    num_parameters = weights.num_parameters(is_tied=model.tie_word_embeddings)
    link: DeviceLink | None = None
    sampler: Sampler
    if is_triton:
        parts = load_on_device(config, backend_name, model, weights, layout, kv_dtype, size_pool, recorder=recorder)
        plan, kv_pool, link, sampler = parts.plan, parts.kv_pool, parts.link, parts.sampler
        forward: Forward = parts.forward
        weights_bytes = _num_bytes(weights)
    else:
        plan = size_pool()
        kv_pool = _host_pool(layout, model.num_layers, plan.num_blocks, kv_dtype)
        sampler = Sampler(model.vocab_size, kernels=_kernels_of(backend_name))
    if is_native:
        kernels = NativeKernels(threads)
        packed = pack_weights(kernels, model, weights, plan.max_model_len, uses_stored=not config.deterministic)
        weights_bytes, backend_reason = packed.num_bytes, f"{kernels.instruction_set}: {backend_reason}"
        if config.deterministic:
            backend_reason += "; the same bits in any batch"
        if packed.max_quantised_rows:
            quantization += f", used as stored in steps of up to {packed.max_quantised_rows} tokens"
        forward = NativeForward(kernels.bind(packed, kv_pool))
    elif not is_triton:
        weights_bytes = _num_bytes(weights)
        forward = _torch_forward(backend_name, device.kind, model, weights, plan.max_model_len, kv_pool)
    info = ModelInfo(
        name=config.served_model_name or checkpoint.name,
        architecture=model.architecture,
        dtype=_name_of(dtype),
        kv_cache_dtype=_name_of(kv_dtype),
        device=device.kind,
        attention_backend=f"{backend_name} ({backend_reason})",
        quantization=quantization,
        num_parameters=num_parameters,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        kv_bytes_per_block=bytes_per_block,
        weights_bytes=weights_bytes,
        threads=threads,
        device_text=device.text,
    )
    logger.info(
        "loaded %s (%s) in %.1f s: %s, %s, %d threads", info.name, model.architecture, perf_counter() - begin,
        info.quantization, dtype_reason, threads,
    )  # fmt: skip
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB, %s; max_model_len %d", info.num_blocks, info.block_size,
        kv_pool.nbytes / GIB, info.kv_cache_dtype, info.max_model_len,
    )  # fmt: skip
    logger.info("device: %s", info.device_text)
    logger.info("attention backend: %s", info.attention_backend)
    return ModelRunner(
        info,
        forward,
        kv_pool,
        sampler,
        num_rows=min(_FIRST_ROWS, config.limits.max_num_seqs),
        link=link,
    )


def _host_pool(layout: KVLayout, num_layers: int, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return allocate(layout, num_layers, num_blocks, dtype)
    except MemoryError as error:
        size = layout.bytes_per_block(num_layers, dtype)
        raise StartupError(f"{num_blocks} KV blocks of {size} bytes could not be allocated: {error}") from error


def _num_bytes(weights: DecoderWeights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors())


def _torch_forward(
    backend: str, device: str, model: ModelConfig, weights: DecoderWeights, max_len: int, kv_pool: torch.Tensor
) -> TorchForward:
    decoder = Decoder(model, weights, max_len, kernels=_kernels_of(backend))
    return TorchForward(decoder, AttentionBackend(backend, device, kv_pool, model.head_dim**-0.5, model.windows))


def _kernels_of(backend: str) -> str:
    """Whose norm, rope, gate and sampling go with a backend's attention."""
    return "reference" if backend == "reference" else "auto"


def choose_dtype(
    requested: str, device: Device | None = None, stored: torch.dtype | None = None
) -> tuple[torch.dtype, str]:
    """(dtype, reason) for `requested`: "auto" = bfloat16 where this CPU multiplies it in hardware, else float32.

    Args:
        requested: what the user asks for.
        device: None = the CPU. On another, "auto" is a 16-bit format.
        stored: the checkpoint's; None = it doesn't say.

    Raises:
        StartupError: there is no such dtype.
    """
    if requested != "auto":
        return _named_dtype("--dtype", requested), f"{requested} as requested"
    if device is not None and device.capability is not None:
        return choose_device_dtype(stored, device.capability)
    capabilities = torch.cpu.get_capabilities()
    features = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    if features:
        return torch.bfloat16, f"bfloat16 (the CPU has {features[0]})"
    return torch.float32, "float32 (the CPU has no bfloat16 instructions)"


def _named_dtype(flag: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise StartupError(f"{flag} {name}: there are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def usable_cores() -> int:
    """Cores this process may use: its affinity, less where a cgroup's quota allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
