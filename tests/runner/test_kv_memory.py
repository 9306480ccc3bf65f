"""Sizing the pool: shrink and say so, refuse with numbers, or warn, by what the user fixed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.errors import StartupError
from engine.runner.kv_memory import free_memory, plan_kv

MIB = 1024**2


def plan(**changes: Any) -> tuple[int, int]:
    values: dict[str, Any] = {
        "bytes_per_block": MIB, "block_size": 16, "model_max_len": 1024, "max_model_len": None,
        "kv_cache_memory_bytes": 100 * MIB, "num_kv_blocks": None, "free_bytes": 1000 * MIB,
    }  # fmt: skip
    result = plan_kv(**(values | changes))
    return result.num_blocks, result.max_model_len


def test_the_models_length_fits(caplog: pytest.LogCaptureFixture) -> None:
    assert plan() == (100, 1024)
    assert plan(max_model_len=500) == (100, 500)
    assert caplog.records == []


def test_an_unset_length_shrinks_to_what_fits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(kv_cache_memory_bytes=20 * MIB + 5) == (20, 320)
    assert "shrinks from the model's 1024 to 320 tokens: 20 blocks of 16" in caplog.text
    assert "64 would be needed" in caplog.text


def test_a_set_length_that_does_not_fit_is_refused_with_need_have_and_largest() -> None:
    with pytest.raises(StartupError, match=r"1000 needs 63 KV .* \(0\.06 GiB\), there are 20 .* that fits is 320"):
        plan(kv_cache_memory_bytes=20 * MIB, max_model_len=1000)
    assert plan(kv_cache_memory_bytes=20 * MIB, max_model_len=320) == (20, 320)


def test_a_length_the_model_was_not_made_for_is_refused() -> None:
    with pytest.raises(StartupError, match="1 to 1024 tokens"):
        plan(max_model_len=1025)


def test_memory_is_capped_by_what_is_free(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(free_bytes=40 * MIB) == (36, 576)
    assert "0.04 GiB are free" in caplog.text
    assert plan(free_bytes=None) == (100, 1024)


def test_not_one_block_is_refused() -> None:
    with pytest.raises(StartupError, match="not one block fits"):
        plan(kv_cache_memory_bytes=MIB - 1)


def test_an_explicit_number_of_blocks_warns_and_is_never_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert plan(num_kv_blocks=3, max_model_len=1000, free_bytes=0) == (3, 1000)
    assert "requests over 48 tokens will be refused" in caplog.text
    assert "--num-kv-blocks 3 takes 0.00 GiB, 0.00 GiB are free" in caplog.text
    caplog.clear()
    assert plan(num_kv_blocks=3) == (3, 48)
    assert "are free" not in caplog.text
    assert plan(num_kv_blocks=500) == (500, 1024)
    with pytest.raises(StartupError, match="at least one block"):
        plan(num_kv_blocks=0)


def test_free_memory_is_a_plausible_number() -> None:
    free = free_memory()
    assert free is None or 0 <= free < 2**50
