"""The GPU path in one command, in at most ten minutes: is it right, and how fast is it?

    python -m engine.bench.gpu             on a machine with a GPU
    python -m engine.bench.gpu --dry-run   this script's own logic, on a CPU: tiny sizes, interpreted kernels

Five parts: each kernel against the reference; attention's share of what the device copies and multiplies; the
engine's tokens against the CPU's; memory taken during a workload; nano-vllm's workload on Qwen3-0.6B's shape with
random weights, alternating with transformers' continuous batching. Prints tables, and last one JSON line.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from engine.bench.report import emit, format_table, say
from engine.bench.workloads import Item, Workload, make_workload

if TYPE_CHECKING:
    import torch

    from engine.bench.gpu_engine import Rate

PEER_DEADLINE_S = 420.0  # after so long no further repetition of the peer begins
_MEMORY_SHARE = 0.45  # of the device, for each engine: both are loaded, so that their repetitions alternate


def main(argv: list[str] | None = None) -> int:
    """Run all parts; 0 if everything is right, 1 if something isn't, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="Tiny sizes and interpreted kernels, on a CPU.")
    parser.add_argument("--reps", type=int, default=3, help="Repetitions of the workload, of each engine. Default: 3.")
    parser.add_argument("--no-peer", action="store_true", help="Leave transformers out.")
    args = parser.parse_args(argv)
    if args.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        say("no GPU: PyTorch sees no CUDA device, so nothing was measured (--dry-run tries the script itself on a CPU)")
        emit({"ok": False, "error": "no GPU: PyTorch sees no CUDA device"})
        return 2
    device = torch.device("cpu" if args.dry_run else "cuda")
    started = perf_counter()
    results: dict[str, object] = {"device": "cpu, a dry run" if args.dry_run else torch.cuda.get_device_name()}
    say(f"device: {results['device']}; PyTorch {torch.__version__}")
    is_ok = _kernels(device, results, is_tiny=args.dry_run)
    with tempfile.TemporaryDirectory() as folder:
        is_ok &= _tokens(Path(folder), device, results)
        is_ok &= _workload(Path(folder), device, results, args, started)
    results |= {"ok": is_ok, "seconds": round(perf_counter() - started, 1)}
    emit(results)
    return 0 if is_ok else 1


def _kernels(device: torch.device, results: dict[str, object], *, is_tiny: bool) -> bool:
    import torch

    from engine.bench.gpu_kernels import TINY, KernelSizes, attention_rates, check_kernels

    sizes = TINY if is_tiny else KernelSizes()
    checks = check_kernels(device, sizes)
    say(format_table(
        ("kernel", "format", "largest error", "tolerance", ""),
        [(c.kernel, c.dtype, c.error, c.tolerance, "" if c.is_ok else "WRONG") for c in checks],
    ))  # fmt: skip
    wrong = [f"{check.kernel} {check.dtype}" for check in checks if not check.is_ok]
    rates = attention_rates(device, torch.float32 if is_tiny else torch.bfloat16, sizes)
    say(format_table(("attention", "value"), list(rates.items())))
    results |= {"kernels_checked": len(checks), "kernels_wrong": wrong, **{k: round(v, 4) for k, v in rates.items()}}
    return not wrong


def _tokens(folder: Path, device: torch.device, results: dict[str, object]) -> bool:
    import torch

    from engine.bench.gpu_engine import TINY_QWEN3, compare_tokens, save_random_model

    model = save_random_model(TINY_QWEN3, folder / "tiny", torch.device("cpu"), torch.float32)
    found = compare_tokens(model, device, *((2, 2) if device.type == "cpu" else (8, 16)))
    say(f"tokens on the device and on the CPU: {found['differing']} of {found['requests']} requests differ")
    results["tokens"] = found
    return found["differing"] == 0


def _workload(
    folder: Path, device: torch.device, results: dict[str, object], args: argparse.Namespace, started: float
) -> bool:
    import torch

    from engine.bench.gpu_engine import QWEN3, TINY_QWEN3, Ours, Transformers, save_random_model, segments_taken
    from engine.config import EngineConfig
    from engine.core.limits import Limits

    dtype = torch.float32 if args.dry_run else torch.bfloat16
    model = save_random_model(TINY_QWEN3 if args.dry_run else QWEN3, folder / "model", device, dtype)
    workload = make_workload("nano-vllm:2" if args.dry_run else "nano-vllm")
    limits = Limits(max_num_seqs=256, max_num_batched_tokens=16_384, max_num_queued_reqs=100_000)
    config = EngineConfig(
        str(model), max_model_len=2_049, device=device.type, attention_backend="triton", limits=limits,
        gpu_memory_utilization=_MEMORY_SHARE,
    )  # fmt: skip
    if args.dry_run:
        workload = _shortened(workload)
        config = replace(config, dtype="float32", max_model_len=64, num_kv_blocks=16)
    ours = Ours(config, workload)
    info = ours.engine.info
    say(
        f"{workload.name}: {workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens; "
        f"{info.dtype}, {info.num_blocks:,} blocks, {info.attention_backend}; started in {ours.startup_s:.1f} s"
    )
    taken = None
    if not args.dry_run:  # before another engine shares the allocator; the first repetition meets each shape once
        ours.run(-2)
        taken = segments_taken(ours, -1)
        say(f"pieces of memory taken from the device during a whole run: {taken}")
    sizes = {"num_blocks": 8, "max_batch_tokens": 64} if args.dry_run else {"max_memory_percent": _MEMORY_SHARE}
    peer = None if args.no_peer else Transformers(model, workload, device, dtype, sizes)
    rates: list[Rate] = []
    for rep in range(args.reps):
        rates.append(ours.run(rep))
        if peer is not None and perf_counter() - started < PEER_DEADLINE_S:
            try:
                rates.append(peer.run(rep))
            except (RuntimeError, ValueError, ImportError) as error:  # what was measured so far is still worth having
                say(f"transformers' continuous batching failed: {error}")
                results["peer_error"], peer = str(error), None
    if peer is not None:
        results["peer_attention"] = peer.attention
    say(format_table(
        ("engine", "output tok/s", "seconds", "errors"),
        [(rate.engine, rate.output_tokens_per_s, rate.seconds, rate.errors) for rate in rates],
    ))  # fmt: skip
    medians = {
        engine: median(rate.output_tokens_per_s for rate in rates if rate.engine == engine)
        for engine in dict.fromkeys(rate.engine for rate in rates)
    }
    results |= {
        "workload": workload.name,
        "runs": [asdict(rate) for rate in rates],
        "output_tokens_per_s": {engine: round(rate, 1) for engine, rate in medians.items()},
        "ratio": round(medians["pagedeck"] / medians["transformers"], 2) if medians.get("transformers") else None,
        "segments_taken": taken,
    }
    for line in (f"{engine}: {rate:,.0f} output tokens/s in the median" for engine, rate in medians.items()):
        say(line)
    return not taken and not any(rate.errors for rate in rates if rate.engine == "pagedeck")


def _shortened(workload: Workload) -> Workload:
    """A few tokens of each request, from the vocabulary of a tiny model."""
    items = [Item(tuple(t % 300 for t in item.prompt_token_ids[:10]), 2) for item in workload.items]
    return Workload(f"{workload.name}, shortened", tuple(items))


if __name__ == "__main__":
    raise SystemExit(main())
