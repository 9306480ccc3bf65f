"""Workloads: read from files of any origin, made the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.bench.workloads import Item, WorkloadError, load_workload, make_workload, read_workload


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_file_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    late = {"prompt_token_ids": [1, 2], "max_tokens": 3, "arrival_s": 1.5}
    early = {"prompt_token_ids": [4], "max_tokens": 5}
    workload = load_workload(str(write(tmp_path / "two.jsonl", late, early)), None)
    assert workload.name == "two"
    assert workload.items == (Item((4,), 5, 0.0), Item((1, 2), 3, 1.5))
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (3, 8)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"max_tokens": 1}, "prompt_token_ids is missing"),
        ({"prompt_token_ids": [], "max_tokens": 1}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": ["a"], "max_tokens": 1}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": [1], "max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"prompt_token_ids": [1], "max_tokens": 1, "arrival_s": -1}, "arrival_s must be seconds >= 0, got -1"),
        ([1], "not a request"),
    ],
)
def test_a_line_that_is_no_request_is_named(row: object, why: str, tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", {"prompt_token_ids": [1], "max_tokens": 1}, row)
    with pytest.raises(WorkloadError, match="line 2: not a request") as error:
        read_workload(path)
    assert why in str(error.value)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds no request"):
        read_workload(write(tmp_path / "w.jsonl"))


def test_the_same_name_and_seed_make_the_same_requests() -> None:
    assert make_workload("mixed:5") == make_workload("mixed:5")
    assert make_workload("mixed:5", seed=1) != make_workload("mixed:5")


def test_mixed_has_lengths_from_32_to_256_all_at_once() -> None:
    items = make_workload("mixed:200").items
    assert len(items) == 200
    for lengths in ([len(i.prompt_token_ids) for i in items], [i.max_tokens for i in items]):
        assert 32 <= min(lengths) < 45
        assert 244 < max(lengths) <= 256
    assert {i.arrival_s for i in items} == {0.0}


def test_shared_prefix_shares_512_tokens_and_no_more() -> None:
    items = make_workload("shared-prefix").items
    assert len(items) == 64
    assert len({i.prompt_token_ids[:512] for i in items}) == 1
    assert len({i.prompt_token_ids[512:] for i in items}) == 64
    assert {(len(i.prompt_token_ids), i.max_tokens) for i in items} == {(544, 32)}


def test_interference_sends_two_long_prompts_after_a_second() -> None:
    shapes = [(len(i.prompt_token_ids), i.max_tokens, i.arrival_s) for i in make_workload("interference").items]
    assert shapes == [(64, 200, 0.0)] * 16 + [(4000, 16, 1.0)] * 2


@pytest.mark.parametrize("spec", ["", "mixd", "mixed:0", "mixed:x", "mixed:-1"])
def test_other_names_are_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(WorkloadError, match="--workload"):
        make_workload(spec)
