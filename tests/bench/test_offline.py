"""The offline bench, on an engine with a fake model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import engine.bench.offline
from engine.bench.offline import run_offline, run_once
from engine.bench.workloads import Item, Workload
from engine.config import EngineConfig
from engine.engine import Engine
from tests.helpers.engines import make_engine


def workload(num: int, prompt: int = 20, output: int = 12) -> Workload:
    """`num` requests of different ids, arriving late, which this bench ignores."""
    items = [Item(tuple((11 * n + i) % 250 for i in range(prompt)), output, arrival_s=1e6) for n in range(num)]
    return Workload("made", tuple(items))


def test_every_request_gives_exactly_its_tokens() -> None:
    result = run_once(make_engine(), workload(5), rep=2, startup_s=0.5)
    assert (result.num_requests, result.prompt_tokens, result.output_tokens) == (5, 100, 60)
    assert (result.rep, result.startup_s, result.errors, result.num_preemptions) == (2, 0.5, 0, 0)
    assert result.duration_s >= 0
    assert result.output_tokens_per_s > 0


def test_end_tokens_do_not_end_a_request() -> None:
    def always_eos(token_ids: list[int], _params: object) -> int:
        return min(engine.tokenizer.eos_token_ids)

    engine = make_engine(choose=always_eos)
    assert engine.tokenizer.eos_token_ids
    assert run_once(engine, workload(2), 0, 0.0).output_tokens == 24


def test_preemptions_are_counted_and_lose_no_token() -> None:
    result = run_once(make_engine(num_blocks=6), workload(4, prompt=14, output=30), 0, 0.0)
    assert result.num_preemptions > 0
    assert (result.output_tokens, result.errors) == (120, 0)


def test_the_prefix_cache_is_empty_before_each_repetition() -> None:
    computed: list[int] = []
    engine = make_engine(before_step=lambda batch: computed.append(sum(s.num_tokens for s in batch.scheduled)))
    for rep in range(3):
        run_once(engine, workload(3, prompt=64), rep, 0.0)
        assert sum(computed) == 3 * (64 + 11)  # every token but the last one that came out, nothing from the cache
        computed.clear()


def test_a_request_that_can_never_fit_is_an_error_and_not_a_hang(capsys: pytest.CaptureFixture[str]) -> None:
    items = (*workload(2).items, Item(tuple(range(200)), 4))
    result = run_once(make_engine(num_blocks=8), Workload("made", items), 0, 0.0)
    assert (result.errors, result.output_tokens) == (1, 24)
    assert "request 2 was refused" in capsys.readouterr().err


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Engines of the bench have a fake model; holds the configurations they were asked for with."""
    configs: list[EngineConfig] = []

    def from_config(config: EngineConfig) -> Engine:
        configs.append(config)
        return make_engine(num_blocks=64, max_num_queued_reqs=config.limits.max_num_queued_reqs)

    monkeypatch.setattr(engine.bench.offline.Engine, "from_config", staticmethod(from_config))
    return configs


def test_a_line_of_json_per_repetition_goes_to_stdout_and_a_table_to_stderr(
    fake_model: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_offline(EngineConfig(), workload(3), reps=2, warmup=2) == 0
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["rep"] for line in lines] == [0, 1]
    assert all(line["engine"] == "pagedeck" and line["output_tokens"] == 36 for line in lines)
    assert set(lines[0]) >= {
        "num_requests", "prompt_tokens", "output_tokens", "duration_s", "startup_s", "output_tokens_per_s",
        "num_preemptions", "engine", "rep",
    }  # fmt: skip
    assert "median" in output.err


def test_its_own_requests_are_never_too_many_for_the_queue(fake_model: list[EngineConfig]) -> None:
    assert run_offline(EngineConfig(), workload(1500, prompt=2, output=1), reps=1, warmup=0) == 0
    assert fake_model[0].limits.max_num_queued_reqs == 1500


def test_the_exit_status_tells_of_errors(fake_model: list[EngineConfig]) -> None:
    too_long = Workload("made", (Item(tuple(range(200)) * 20, 4),))
    assert run_offline(EngineConfig(), too_long, reps=1, warmup=0) == 1


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_runs_a_workload_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from app.cli import main

    path = tmp_path / "w.jsonl"
    rows = [{"prompt_token_ids": list(range(100, 110 + n)), "max_tokens": 3 + n, "arrival_s": 0.0} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    flags = ["--num-kv-blocks", "64", "--threads", "2", "--warmup", "1", "--dtype", "float32"]
    assert main(["bench", "offline", "--workload-file", str(path), "--reps", "2", *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["output_tokens"], line["errors"]) for line in lines] == [(12, 0), (12, 0)]
