"""A model's weights, KV pool, graphs and sampler on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderWeights
from engine.runner.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder, graph_sizes
from engine.runner.device import CudaMemory, DeviceMemory
from engine.runner.device_forward import DeviceForward
from engine.runner.device_sampler import DeviceSampler
from engine.runner.inputs import StepInputs
from engine.runner.kv_memory import Budget, KvPlan, device_budget, profile_memory
from engine.runner.transfer import DeviceLink
from kernels.layout import KVLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a runner on a device is made of."""

    forward: DeviceForward
    sampler: DeviceSampler
    kv_pool: torch.Tensor
    plan: KvPlan
    link: DeviceLink


def load_on_device(
    config: EngineConfig,
    backend: str,
    model: ModelConfig,
    weights: DecoderWeights,
    layout: KVLayout,
    kv_dtype: torch.dtype,
    plan: Callable[[Budget | None], KvPlan],
    *,
    recorder: Recorder | None = None,
    memory: DeviceMemory | None = None,
) -> DeviceParts:
    """Size and allocate the pool, and capture graphs.

    Args:
        config: the engine's.
        backend: of attention; its kernels do the rest too.
        model, weights: on the device.
        layout: of a block.
        kv_dtype: of the pool.
        plan: sizes the pool, by a device's budget if there is one.
        recorder: of graphs; None = CUDA's where that is the device, else there are none.
        memory: of the device; None = CUDA's where that is the device, else the pool is sized as on a CPU.

    Raises:
        StartupError: the pool doesn't fit.
    """
    device = weights.embedding.device
    limits = config.limits
    if device.type == "cuda":
        recorder, memory = recorder or CudaRecorder(), memory or CudaMemory()
    max_len = model.max_position_embeddings if config.max_model_len is None else config.max_model_len
    decoder = Decoder(model, weights, max_len, kernels=backend)
    scale = model.head_dim**-0.5
    link = DeviceLink(device)
    sizes = graph_sizes(limits.max_num_seqs) if recorder is not None and not config.enforce_eager else ()
    budget = None
    if memory is not None:
        one_block = _pool(layout, model.num_layers, 1, kv_dtype, device)
        attention = AttentionBackend(backend, device.type, one_block, scale, model.windows)
        num_tokens = limits.max_num_batched_tokens
        step = _LargestStep(DeviceForward(decoder, attention, link), device, num_tokens, limits.max_num_seqs, max_len)
        step()  # compiles kernels and sets up libraries
        profile = profile_memory(memory, step)
        budget = device_budget(profile, config.gpu_memory_utilization, (sizes[-1] if sizes else 0) / num_tokens)
        logger.info("memory for keys and values: %.2f GiB (%s)", budget.num_bytes / 2**30, budget.origin)
        del one_block, attention, step
    found = plan(budget)
    pool = _pool(layout, model.num_layers, found.num_blocks, kv_dtype, device)
    forward = DeviceForward(decoder, AttentionBackend(backend, device.type, pool, scale, model.windows), link)
    if sizes and recorder is not None:
        begin = perf_counter()
        graphs = DecodeGraphs(sizes, layout.num_blocks_for(found.max_model_len + 1), device, link)
        forward.use_graphs(graphs, recorder)
        logger.info("captured %d decode graphs, up to %d sequences, in %.1f s", len(sizes), sizes[-1],
                    perf_counter() - begin)  # fmt: skip
    sampler = DeviceSampler(model.vocab_size, kernels=backend, device=device.type, link=link)
    return DeviceParts(forward, sampler, pool, found, link)


def _pool(layout: KVLayout, num_layers: int, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All layers' caches, `[num_layers, *cache_shape]`, zeros."""
    shape = (num_layers, *layout.cache_shape(num_blocks))
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # PyTorch's own out-of-memory errors are RuntimeErrors
        reason = str(error).splitlines()[0]
        raise StartupError(f"{num_blocks} KV blocks could not be allocated on {device.type}: {reason}") from error


class _LargestStep:
    """A prefill of as many tokens as a step may have, and logits for as many sequences. Nothing is stored: all tokens
    have slot -1, and every sequence reads the same block again and again, whatever the size of a block."""

    def __init__(
        self, forward: DeviceForward, device: torch.device, num_tokens: int, num_seqs: int, max_len: int
    ) -> None:
        lengths = [max_len] * (num_tokens // max_len)
        lengths += [num_tokens % max_len] if num_tokens % max_len else []
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._forward, self._num_rows = forward, min(num_seqs, num_tokens)
        longs = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._inputs = StepInputs(
            longs,
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            AttentionMetadata(
                num_decodes=0,
                query_start_loc=starts.to(device, torch.int32),
                seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
                block_tables=torch.zeros((len(lengths), max(lengths)), dtype=torch.int32, device=device),
                slot_mapping=torch.full_like(longs, -1),
            ),
            starts[1:].numpy() - 1,
        )

    @torch.inference_mode()
    def __call__(self) -> None:
        hidden = self._forward.compute(self._inputs)
        logits = self._forward.logits(hidden[: self._num_rows])
        torch.log_softmax(logits, dim=1)
