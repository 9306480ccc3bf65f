"""The whole engine on the Triton backend, interpreted: the CPU backend's tokens, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core.events import StepRecord
from engine.core.limits import Limits
from engine.engine import Engine
from engine.runner.executor import load_runner
from engine.runner.model_runner import ModelRunner
from tests.helpers.checkpoints import save_hf, tiny_model
from tests.helpers.engines import Recorder, make_request
from tests.helpers.tokenizers import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

HEAD = [(7 * i) % 250 for i in range(16)]  # a block that several prompts begin with
LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=24, watermark=0.0)
NUM_BLOCKS = 7
MODEL = {  # norms of heads; one layer sees 20 tokens, the other all
    "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4, "sliding_window": 20,
    "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip


class FunctionRecorder:
    """Stands for captured graphs: does again what was captured, over the same memory."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        compute()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return compute()

        return replay


@dataclass
class Run:
    """What became of the same requests."""

    tokens: dict[tuple[str, int], list[int]]
    recorder: Recorder

    def changes(self) -> list[StepRecord]:
        """The executed steps."""
        return [record for record in self.recorder.records if isinstance(record, StepRecord)]


def run(runner: ModelRunner) -> Run:
    """Prompts with a common head, three siblings, a long prompt in chunks, and a pool that can't hold them all."""
    engine = Engine(runner, byte_tokenizer(), LIMITS)
    recorder = Recorder(engine)
    options = {"ignore_eos": True, "logprobs": 2}
    requests = [
        make_request("a", [*HEAD, 1, 2, 3], max_tokens=4, **options),
        make_request("siblings", [9, 8, 7, 6, 5], max_tokens=5, n=3, temperature=0.9, top_k=40, seed=3, **options),
        make_request("long", list(range(40)), max_tokens=3, **options),
        make_request(
            "b", [*HEAD, 5], max_tokens=4, temperature=0.8, top_p=0.9, seed=1, presence_penalty=0.5, **options
        ),
    ]
    for request in requests:
        recorder.take(engine.add(request))
    for _ in range(3):
        recorder.take(engine.step())
    recorder.take(engine.set_limits({"num_usable_blocks": 3}))  # what runs has more
    recorder.run()
    engine.scheduler.check_invariants()
    keys = {(delta.request_id, delta.index) for delta in recorder.deltas}
    return Run({key: recorder.tokens(*key) for key in sorted(keys)}, recorder)


def test_the_same_tokens_with_preemption_hits_chunks_and_copies(tmp_path: Path) -> None:
    folder = str(save_hf(tiny_model("qwen3", **MODEL), tmp_path / "m"))

    def config(backend: str) -> EngineConfig:
        return EngineConfig(
            folder, dtype="float32", num_kv_blocks=NUM_BLOCKS, threads=1, attention_backend=backend, device="cpu",
            max_model_len=64, limits=LIMITS,
        )  # fmt: skip

    graphs = FunctionRecorder()
    runner = load_runner(config("triton"), recorder=graphs)
    assert runner.info.attention_backend == "triton (kernels for GPUs; as requested)"
    found, expected = run(runner), run(load_runner(config("cpu")))

    assert found.tokens == expected.tokens
    assert len(found.tokens) == 6
    assert {len(tokens) for tokens in found.tokens.values()} == {3, 4, 5}
    steps = found.changes()
    assert sum(len(record.changes.preempted) for record in found.recorder.records) >= 2
    assert sum(admitted.num_cached_tokens for step in steps for admitted in step.changes.admitted) >= 16
    assert sum(event.kind == "copy" for step in steps for event in step.changes.blocks) >= 2
    assert sum(c.seq_id.startswith("long") and c.num_tokens > 1 for step in steps for c in step.changes.computed) >= 2
    assert graphs.num_replays >= 3
    assert runner._link is not None
    assert runner._link.num_fetches <= len(steps)  # one copy to the host per step, and none where nothing is sampled
