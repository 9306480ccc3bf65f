"""The GPU script's own logic: what it says without a GPU, a dry run on interpreted kernels, what counts as wrong."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from engine.bench.gpu import main
from engine.bench.gpu_engine import plain_tokenizer
from engine.bench.gpu_kernels import Check
from engine.bench.workloads import make_workload


def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"ok": False, "error": "no GPU: PyTorch sees no CUDA device"}
    assert "nothing was measured" in printed.err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_dry_run_does_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--reps", "1", "--no-peer"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["ok"]
    assert result["kernels_wrong"] == []
    assert result["kernels_checked"] == 33
    assert result["tokens"] == {"requests": 2, "differing": 0}
    assert [run["engine"] for run in result["runs"]] == ["pagedeck"]
    assert result["output_tokens_per_s"]["pagedeck"] > 0
    assert result["ratio"] is None
    assert "WRONG" not in printed.err


@pytest.mark.parametrize(("error", "is_ok"), [(0.01, True), (0.02, True), (0.021, False), (float("nan"), False)])
def test_what_is_wrong(error: float, is_ok: bool) -> None:
    assert Check("paged_decode", "bfloat16", error, 0.02).is_ok is is_ok


def test_the_workload_is_nano_vllms() -> None:
    workload = make_workload("nano-vllm")
    assert (len(workload.items), workload.num_prompt_tokens, workload.num_output_tokens) == (256, 142_827, 133_966)


def test_the_tokenizer_of_random_models_has_a_text_for_every_id() -> None:
    tokenizer = plain_tokenizer(300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.decode([97, 299]) == "aw299"
