"""Fifty schemas, regexes, choices and grammars on the real model, at temperature 1 and much of the pool preempted."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
import regex

from engine.bench.structured_cases import GRAMMARS, specs
from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.engine import Engine, Request
from engine.sampling_params import SamplingParams, StructuredSpec
from tests.helpers.engines import Recorder

pytestmark = [pytest.mark.model, pytest.mark.slow]

MAX_TOKENS = 160
PROMPT = "<|im_start|>user\nGive me one example, nothing else.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    limits = Limits(max_num_seqs=64)
    return Engine.from_config(EngineConfig(num_kv_blocks=1024, threads=2, max_model_len=1024, limits=limits))


def is_valid(spec: StructuredSpec, text: str) -> bool:
    """Judged by other libraries than the one that made it."""
    if spec.kind == "json_schema":
        validator = jsonschema_rs.validator_for(json.loads(spec.text), validate_formats=True)
        return bool(validator.is_valid(json.loads(text)))
    if spec.kind == "regex":
        return regex.fullmatch(spec.text, text) is not None
    if spec.kind == "choice":
        return text in json.loads(spec.text)
    return re.fullmatch(dict(GRAMMARS)[spec.text], text) is not None


def run(engine: Engine, name: str, n: int = 1) -> tuple[Recorder, list[StructuredSpec]]:
    recorder, all_specs = Recorder(engine), specs()
    prompt = tuple(engine.tokenizer.encode(PROMPT, add_special_tokens=False))
    for index, spec in enumerate(all_specs):
        params = SamplingParams(temperature=1.0, seed=100 * index, max_tokens=MAX_TOKENS, structured=spec, n=n)
        recorder.take(engine.add(Request(f"{name}-{index}", prompt, params)))
    recorder.run()
    return recorder, all_specs


def check(recorder: Recorder, all_specs: list[StructuredSpec], name: str) -> list[str]:
    """Every answer is valid or was ended by its length; returns how each ended."""
    reasons = []
    for index, spec in enumerate(all_specs):
        (reason,) = recorder.ends(f"{name}-{index}")
        text = recorder.text(f"{name}-{index}")
        assert reason in ("stop", "length"), f"{spec.text}: {reason}"
        if reason == "stop":
            assert is_valid(spec, text), f"{spec.text}: {text!r}"
        reasons.append(reason)
    return reasons


def test_every_answer_is_valid_or_ended_by_its_length(engine: Engine) -> None:
    recorder, all_specs = run(engine, "free")
    assert len(all_specs) == 50
    reasons = check(recorder, all_specs, "free")
    assert reasons.count("stop") >= 40, "the cases are made so that most can end"


def test_so_it_is_while_sequences_are_preempted(engine: Engine) -> None:
    engine.set_limits({"num_usable_blocks": 36, "watermark": 0.0})
    try:
        recorder, all_specs = run(engine, "tight")
    finally:
        engine.set_limits({"num_usable_blocks": 1024, "watermark": 0.01})
    assert sum(len(record.changes.preempted) for record in recorder.records) >= 3
    check(recorder, all_specs, "tight")
