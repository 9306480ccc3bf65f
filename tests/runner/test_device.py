"""The choice of device and format, and the arithmetic of its memory, on devices that aren't there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.backend import choose_backend
from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.errors import StartupError
from engine.runner.device import Device, choose_device, choose_device_dtype
from engine.runner.device_loading import load_on_device
from engine.runner.executor import choose_dtype
from engine.runner.kv_memory import Budget, KvPlan, MemoryProfile, device_budget, plan_kv, profile_memory
from engine.weights.checkpoint import resolve_model
from engine.weights.loader import load_weights, open_checkpoint
from kernels.layout import KVLayout
from tests.helpers.checkpoints import save_hf, tiny_llama

GIB = 1024**3


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Imaginary 9000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize(("build", "why"), [(None, "this build of PyTorch has no CUDA"),
                                            ("13.0", "PyTorch sees no CUDA device")])  # fmt: skip
def test_without_a_gpu(build: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").text == f"cpu ({why})"
    assert choose_device("cpu").text == "cpu (as requested)"
    with pytest.raises(StartupError, match=f"--device cuda: {why}"):
        choose_device("cuda")
    with pytest.raises(StartupError, match="--device tpu: there are auto, cpu, cuda"):
        choose_device("tpu")


@pytest.mark.usefixtures("a_gpu")
def test_with_a_gpu() -> None:
    assert choose_device("auto").text == "cuda (Imaginary 9000, the first that PyTorch sees)"
    assert choose_device("cuda") == Device("cuda", "Imaginary 9000", "as requested", (9, 0))
    assert choose_device("cpu").kind == "cpu"
    assert choose_dtype("auto", choose_device("auto"), torch.float16)[0] == torch.float16
    assert choose_dtype("float32", choose_device("auto"), torch.float16)[0] == torch.float32


@pytest.mark.parametrize(
    ("stored", "capability", "expected"),
    [
        (torch.bfloat16, (9, 0), torch.bfloat16),
        (torch.bfloat16, (7, 5), torch.float16),
        (torch.float16, (8, 0), torch.float16),
        (torch.float32, (8, 6), torch.bfloat16),
        (None, (7, 0), torch.float16),
        (None, (8, 0), torch.bfloat16),
    ],
)
def test_formats_of_a_device(stored: torch.dtype | None, capability: tuple[int, int], expected: torch.dtype) -> None:
    dtype, reason = choose_device_dtype(stored, capability)
    assert dtype == expected
    assert reason.startswith(str(expected).removeprefix("torch."))


def test_a_backend_that_cannot_run_on_the_device_is_refused() -> None:
    for name in ("native", "cpu", "reference"):
        with pytest.raises(StartupError, match=f"--attention-backend {name}: it computes on the CPU, on cuda there is"):
            choose_backend(name, "cuda", None)
    if not torch.cuda.is_available():
        with pytest.raises(StartupError, match=r"--attention-backend triton: .*there is no CUDA device"):
            choose_backend("auto", "cuda", None)


class FakeMemory:
    """A device of 10 GiB: 1 is others', 3 are this process's weights, and a step takes 0.5."""

    def __init__(self, step: int = GIB // 2) -> None:
        self.step = step
        self.held = 3 * GIB
        self.most = self.held
        self.log: list[str] = []

    def total(self) -> int:
        return 10 * GIB

    def free(self) -> int:
        return self.total() - GIB - self.held

    def reserved(self) -> int:
        return self.held

    def peak(self) -> int:
        return self.most

    def release(self) -> None:
        self.log.append("release")
        self.most = self.held

    def run(self) -> None:
        self.log.append("step")
        self.most = max(self.most, self.held + self.step)


def test_a_profile_is_what_the_largest_step_takes_beside_the_weights() -> None:
    memory = FakeMemory()
    assert profile_memory(memory, memory.run) == MemoryProfile(10 * GIB, 6 * GIB, GIB // 2)
    assert memory.log == ["release", "step", "release"]


def test_the_pool_gets_what_the_rest_leaves_of_the_utilisation() -> None:
    profile = MemoryProfile(10 * GIB, 6 * GIB, GIB // 2)
    assert device_budget(profile, 0.9).num_bytes == 9 * GIB - 4 * GIB - GIB // 2
    with_graphs = device_budget(profile, 0.9, 0.25)
    assert with_graphs.num_bytes == 9 * GIB - 4 * GIB - GIB // 2 - GIB // 8
    assert with_graphs.origin == (
        "--gpu-memory-utilization 0.9 of 10.00 GiB, less 4.00 in use, 0.50 for a step and 0.12 for graphs"
    )
    sizes: dict[str, Any] = {
        "bytes_per_block": GIB // 1024, "block_size": 16, "model_max_len": 10**6, "max_model_len": None,
        "kv_cache_memory_bytes": 1, "num_kv_blocks": None, "free_bytes": 1,
    }  # fmt: skip
    assert plan_kv(**sizes, budget=with_graphs) == KvPlan(4480, 4480 * 16)
    with pytest.raises(StartupError, match=r"has 0 \(--gpu-memory-utilization 0.3 of 10.00 GiB.*not one block fits"):
        plan_kv(**sizes, budget=device_budget(profile, 0.3))


class FakeRecorder:
    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        compute()
        self.num_recorded += 1
        return compute


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_loading_profiles_the_largest_step_and_sizes_the_pool_by_it(tmp_path: Path, enforce_eager: bool) -> None:
    """The whole path with interpreted kernels and a device's memory that is made up."""
    loaded = open_checkpoint(resolve_model(str(save_hf(tiny_llama(num_hidden_layers=1), tmp_path / "m"))))
    model = loaded.config
    memory, recorder, asked = FakeMemory(), FakeRecorder(), []
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=8)
    config = EngineConfig(limits=limits, max_model_len=5, enforce_eager=enforce_eager)

    def plan(budget: Budget | None) -> KvPlan:
        assert budget is not None
        asked.append(budget.num_bytes)
        return KvPlan(3, 5)

    parts = load_on_device(
        config, "triton", model, load_weights(loaded.source, model, torch.float32),
        KVLayout(model.num_kv_heads, 16, model.head_dim), torch.float32, plan, recorder=recorder, memory=memory,
    )  # fmt: skip
    assert asked == [9 * GIB - 4 * GIB]  # this memory can't see what the CPU's tensors take
    assert parts.kv_pool.shape[:2] == (1, 3)
    assert recorder.num_recorded == (0 if enforce_eager else 2)
    assert parts.kv_pool.count_nonzero() == 0  # neither the profile nor a capture stores anything
