"""Structured output: every answer is valid or ends by length, whatever is preempted, forked or asked for beside it."""

from __future__ import annotations

import json
import random
import re
import resource

import numpy as np
import pytest

from engine.errors import InvalidValueError
from engine.sampling_params import StructuredSpec
from engine.structured.grammars import MAX_KEPT, Grammars
from tests.helpers.engines import Recorder, make_engine, make_request
from tests.helpers.fake_runner import allowed_tokens
from tests.helpers.tokenizers import EOS, IM_END, byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_SPEC = StructuredSpec("json_schema", json.dumps(SCHEMA))
DIGITS = StructuredSpec("regex", "[0-9]{30,40}")


def test_output_is_a_sentence_of_the_schema_and_ends_by_itself() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", structured=JSON_SPEC, max_tokens=500)))
    recorder.run()
    value = json.loads(recorder.text("r"))
    assert set(value) == {"name", "age"}
    assert 0 <= value["age"] <= 99
    assert recorder.ends("r") == ["stop"]


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (StructuredSpec("regex", "[a-c]{2,4}-[0-9]+x"), "[a-c]{2,4}-[0-9]+x"),
        (StructuredSpec("choice", json.dumps(['say "no"', "ja\n", "日本語"])), 'say "no"|ja\n|日本語'),
        (StructuredSpec("grammar", 'start: "<" WORD ">"\nWORD: /[a-z]{3}/'), "<[a-z]{3}>"),
        (StructuredSpec("grammar", 'root ::= "(" [xy]+ ")"'), r"\([xy]+\)"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_every_kind_of_spec_is_obeyed(spec: StructuredSpec, pattern: str) -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    for i in range(8):
        prompt = list(range(i, i + 9))
        recorder.take(engine.add(make_request(f"r{i}", prompt, structured=spec, max_tokens=200, temperature=1.0)))
    recorder.run()
    for i in range(8):
        if recorder.ends(f"r{i}") == ["stop"]:
            assert re.fullmatch(pattern, recorder.text(f"r{i}"))
        else:
            assert recorder.ends(f"r{i}") == ["length"]
    assert any(recorder.ends(f"r{i}") == ["stop"] for i in range(8))


def test_a_preemption_changes_nothing() -> None:
    def texts(num_blocks: int) -> tuple[list[str], int]:
        engine = make_engine(num_blocks=num_blocks, watermark=0.0)
        recorder = Recorder(engine)
        for name in "ab":
            recorder.take(engine.add(make_request(name, 16, structured=DIGITS, max_tokens=60)))
        recorder.run()
        assert all(re.fullmatch(DIGITS.text, recorder.text(name)) for name in "ab")
        return [recorder.text(name) for name in "ab"], sum(len(r.changes.preempted) for r in recorder.records)

    undisturbed, none = texts(64)
    preempted, some = texts(4)
    assert none == 0 < some
    assert preempted == undisturbed


def test_siblings_have_matchers_of_their_own() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", structured=DIGITS, n=3, temperature=1.0, max_tokens=60)))
    recorder.run()
    texts = [recorder.text("r", i) for i in range(3)]
    assert all(re.fullmatch(DIGITS.text, text) for text in texts)
    assert len(set(texts)) == 3


def test_a_limit_on_the_length_is_said_so() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", structured=DIGITS, max_tokens=7)))
    recorder.run()
    assert re.fullmatch("[0-9]{7}", recorder.text("r"))
    assert recorder.ends("r") == ["length"]


def test_any_end_token_may_end_a_complete_output_and_none_an_incomplete_one() -> None:
    grammars = Grammars(byte_tokenizer(), 300)
    matcher = grammars.matcher(StructuredSpec("regex", "ab"))
    assert allowed_tokens(matcher, 300) == [ord("a")]
    matcher.accept(list(b"ab"))
    assert allowed_tokens(matcher, 300) == [EOS, IM_END]
    matcher.accept((IM_END,))
    assert allowed_tokens(matcher, 300)  # whoever ignores the end gets it again, and no text
    assert set(allowed_tokens(matcher, 300)) <= {EOS, IM_END}


def test_tokens_that_the_model_has_and_the_tokenizer_lacks_are_never_allowed() -> None:
    matcher = Grammars(byte_tokenizer(), 500).matcher(StructuredSpec("regex", "(?s:.)*"))
    assert max(allowed_tokens(matcher, 500)) < 300


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"type": "array", "uniqueItems": true}'),
        ("json_schema", '{"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}'),
        ("json_schema", json.dumps({"allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghij"]})),
        ("regex", "(a"),
        ("regex", "x" * 9000),
        ("grammar", "start: nowhere"),
        ("grammar", "this is no grammar"),
        ("grammar", "x" * 70_000),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_generated_is_refused_by_its_field(kind: str, text: str) -> None:
    grammars = Grammars(byte_tokenizer(), 300)
    with pytest.raises(InvalidValueError) as refused:
        grammars.compile(StructuredSpec(kind, text, "guided_x"))  # type: ignore[arg-type]
    assert refused.value.param == "guided_x"
    assert len(str(refused.value)) < 1000


@pytest.mark.slow
def test_a_schema_that_would_take_hours_and_all_memory_is_given_up_on() -> None:
    schema = {"allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidValueError, match="too much work"):
        Grammars(byte_tokenizer(), 300).compile(StructuredSpec("json_schema", json.dumps(schema)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_refused_request_leaves_the_engine_as_it_was() -> None:
    engine = make_engine()
    with pytest.raises(InvalidValueError):
        engine.add(make_request("r", structured=StructuredSpec("regex", "(a")))
    assert not engine.has_work


def test_specs_are_kept_while_used_and_then_only_the_latest() -> None:
    grammars = Grammars(byte_tokenizer(), 300)
    first = StructuredSpec("regex", "first")
    grammars.hold("first", first, None)
    for i in range(MAX_KEPT + 10):
        grammars.hold(f"r{i}", StructuredSpec("regex", f"x{i}"), None)
        grammars.release(f"r{i}")
    assert grammars.find(first) is not None
    assert grammars.find(StructuredSpec("regex", "x0")) is None
    assert grammars.find(StructuredSpec("regex", f"x{MAX_KEPT}")) is not None
    grammars.release("first")
    grammars.hold("last", StructuredSpec("regex", "last"), None)
    assert grammars.find(first) is None


def test_a_grammar_that_has_reached_a_limit_is_compiled_anew_for_who_comes_next() -> None:
    grammars = Grammars(byte_tokenizer(), 300)
    # Every letter a or b leads to a state of its own.
    spec = StructuredSpec("regex", "(a|b)*a(a|b){18}x")
    grammars.hold("first", spec, None)
    spent = grammars.find(spec)
    mask, rng = np.zeros(10, dtype=np.int32), random.Random(0)
    problem = None
    while problem is None:
        matcher = grammars.matcher(spec)
        for _ in range(2000):
            if problem := matcher.fill(mask):
                break
            matcher.accept((rng.choice(b"ab"),))
    assert "too many states" in problem
    assert grammars.find(spec) is None
    grammars.hold("second", spec, None)
    assert grammars.find(spec) not in (None, spent)
    assert grammars.matcher(spec).fill(mask) is None
