"""How a sequence ends: tokens, stop strings, lengths, failures, aborts in every state."""

from __future__ import annotations

import pytest

from engine.engine import Engine, Request
from engine.errors import EngineDrainingError, InvalidValueError
from engine.sampling_params import SamplingParams
from tests.helpers.engines import Recorder, make_engine, make_request
from tests.helpers.tokenizers import EOS

SCRIPT = b"The answer is DEFGHIJ and more"


def say(tokens: list[int], params: SamplingParams) -> int:
    """Speak the script after a prompt of ten tokens, then EOS for ever."""
    said = len(tokens) - 10
    return SCRIPT[said] if said < len(SCRIPT) else EOS


def run(**options: object) -> Recorder:
    recorder = Recorder(make_engine(choose=say))
    options.setdefault("max_tokens", 100)
    recorder.take(recorder.engine.add(make_request("a", 10, **options)))  # type: ignore[arg-type]
    recorder.run()
    return recorder


def test_eos_ends_with_stop_and_is_not_shown() -> None:
    recorder = run()
    assert recorder.ends("a") == ["stop"]
    assert recorder.text("a") == SCRIPT.decode()
    assert recorder.tokens("a")[-1] == EOS


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    recorder = run(ignore_eos=True, max_tokens=40)
    assert recorder.ends("a") == ["length"]
    assert len(recorder.tokens("a")) == 40


def test_a_stop_string_is_found_across_tokens_and_nothing_of_it_is_sent() -> None:
    recorder = run(stop=("DEFGHIJ",))
    assert recorder.text("a") == "The answer is "
    assert recorder.ends("a") == ["stop"]
    assert recorder.deltas[-1].stop_reason == "DEFGHIJ"
    assert not any("D" in d.text for d in recorder.deltas)


def test_a_stop_string_is_kept_if_asked_for() -> None:
    assert run(stop=("DEFGHIJ",), include_stop_str_in_output=True).text("a") == "The answer is DEFGHIJ"


def test_what_was_held_back_is_flushed_at_the_end() -> None:
    recorder = run(stop=("DEFGHIJKLM",), max_tokens=len("The answer is DEFG"))
    assert recorder.text("a") == "The answer is DEFG"
    assert recorder.ends("a") == ["length"]


def test_a_stop_string_that_waited_for_a_longer_one_counts_when_the_text_ends() -> None:
    """After "answ" only the next character tells whether "nswZZZ", which began earlier, matches."""
    recorder = run(stop=("sw", "nswZZZ"), max_tokens=len("The answ"))
    assert recorder.text("a") == "The an"
    assert recorder.ends("a") == ["stop"]
    assert recorder.deltas[-1].stop_reason == "sw"
    (finished,) = (f for record in recorder.records for f in record.changes.finished)
    assert finished.reason == "stop", "the metrics count what the client is told"


def test_a_stop_string_that_waits_cuts_nothing_of_an_answer_that_is_aborted() -> None:
    engine = make_engine(choose=say)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", max_tokens=50, stop=("sw", "nswZZZ"))))
    for _ in "The answ":
        recorder.take(engine.step())
    recorder.take(engine.abort("a")[1])
    assert recorder.text("a") == "The answ"
    assert recorder.ends("a") == ["abort"]


@pytest.mark.parametrize(("min_tokens", "text"), [(6, "The a"), (8, "The a"), (9, "The answer is DE")])
def test_a_stop_string_may_begin_before_min_tokens_but_not_end_there(min_tokens: int, text: str) -> None:
    recorder = run(stop=("nsw",), min_tokens=min_tokens, max_tokens=len("The answer is DE"))
    assert recorder.text("a") == text


def test_the_prompts_of_one_request_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    validate = SamplingParams.validate
    monkeypatch.setattr(SamplingParams, "validate", lambda params, size: checked.append(validate(params, size)))
    engine, params = make_engine(), SamplingParams(allowed_token_ids=(7, 8))
    for i in range(3):
        engine.add(Request(f"r{i}", (1, 2), params))
    engine.add(Request("other", (1, 2), SamplingParams()))
    assert len(checked) == 2


def test_a_stop_token_ends_and_names_itself() -> None:
    recorder = run(stop_token_ids=(ord("w"),))
    assert recorder.ends("a") == ["stop"]
    assert recorder.deltas[-1].stop_reason == ord("w")
    assert recorder.text("a") == "The answ"


def test_nothing_stops_before_min_tokens() -> None:
    recorder = run(stop=("answer",), stop_token_ids=(ord("h"),), min_tokens=20)
    assert len(recorder.tokens("a")) >= 20
    assert recorder.text("a").startswith("The answer is DEFG")


def test_max_tokens_absent_means_what_is_left_of_the_context_and_the_pool() -> None:
    for num_blocks, length in ((64, 50), (2, 32)):
        engine = make_engine(num_blocks=num_blocks, max_model_len=50)
        recorder = Recorder(engine)
        recorder.take(engine.add(make_request("a", 10, max_tokens=None)))
        recorder.run()
        assert recorder.ends("a") == ["length"]
        assert len(recorder.tokens("a")) == length - 10


def test_a_failed_row_costs_its_own_request_only() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    for name in "ab":
        recorder.take(engine.add(make_request(name)))
    engine._runner.fail_next["a"] = "logits are not finite"  # type: ignore[attr-defined]
    recorder.run()
    assert recorder.ends("a") == ["error"]
    assert next(d.error for d in recorder.deltas if d.finish_reason == "error") == "logits are not finite"
    assert recorder.ends("b") == ["length"]
    assert engine.scheduler.pool.num_in_use == 0


def aborted_in(state: str) -> tuple[Engine, Recorder]:
    engine = make_engine(num_blocks=8, max_num_batched_tokens=32, watermark=0.0)
    recorder = Recorder(engine)
    if state == "preempted":
        for name in ("x", "y", "a"):
            recorder.take(engine.add(make_request(name, 40, max_tokens=80)))
        while engine.scheduler.live_sequences("a")[0].status != "PREEMPTED":
            recorder.take(engine.step())
    else:
        recorder.take(engine.add(make_request("a", 100, max_tokens=20)))
        for _ in range({"waiting": 0, "between chunks": 2, "decoding": 6}[state]):
            recorder.take(engine.step())
    return engine, recorder


@pytest.mark.parametrize("state", ["waiting", "between chunks", "decoding", "preempted"])
def test_an_abort_in_any_state_frees_everything_at_once(state: str) -> None:
    engine, recorder = aborted_in(state)
    receipt, result = engine.abort("a")
    assert recorder.take(result) is not None
    assert receipt.state == "aborted"
    assert not engine.scheduler.live_sequences("a")
    engine.scheduler.check_invariants()
    assert recorder.ends("a") == ["abort"]
    recorder.run()
    assert engine.scheduler.pool.num_in_use == 0
    assert engine.abort("a")[0] == receipt


def test_an_abort_after_the_end_says_how_it_ended() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", max_tokens=3)))
    recorder.run()
    receipt, nothing = engine.abort("a")
    assert nothing is None
    assert (receipt.state, receipt.output_tokens, receipt.blocks_freed) == ("finished:length", 3, 0)
    assert engine.abort("nobody")[0].state == "unknown"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": (300,)}, r"stop_token_ids must be a token id in \[0, 299\], got 300"),
        ({"logit_bias": ((-1, 1.0),)}, r"logit_bias must be a token id in \[0, 299\], got -1"),
        ({"temperature": 2.1}, r"temperature must be a number in \[0, 2\], got 2.1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], got 0.0"),
        ({"top_k": -2}, "top_k must be an integer >= -1, got -2"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"presence_penalty": -3.0}, "presence_penalty must be"),
        ({"logprobs": 21}, r"logprobs must be an integer in \[0, 20\], got 21"),
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"stop": ("",)}, "stop must be non-empty strings, got ''"),
        ({"stop": ("a" * 1025,)}, "stop must be strings of at most 1024 characters"),
        ({"stop": tuple(map(str, range(65)))}, "stop must be at most 64 strings, got '65 strings'"),
        (
            {"allowed_token_ids": (7,) * 301},
            r"allowed_token_ids must be at most as many ids as there are tokens \(300\)",
        ),
        ({"allowed_token_ids": (7, True)}, r"allowed_token_ids must be a token id in \[0, 299\], got True"),
        ({"min_tokens": 9}, r"min_tokens must be at most max_tokens \(8\), got 9"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"prompt": []}, "prompt must be at least one token"),
        ({"prompt": [1, 300]}, r"prompt must be token ids in \[0, 299\], got 300"),
        ({"queue_timeout_s": 0.0}, "queue_timeout_s must be a number of seconds > 0"),
    ],
)
def test_bad_input_costs_one_request_and_names_field_value_and_limit(options: dict[str, object], message: str) -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("good")))
    options = {"prompt": 10, **options}
    with pytest.raises(InvalidValueError, match=message):
        engine.add(make_request("bad", **options))  # type: ignore[arg-type]
    recorder.run()
    assert recorder.ends("good") == ["length"]


def test_a_draining_engine_refuses_new_work_and_finishes_the_old() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a")))
    recorder.take(engine.drain())
    with pytest.raises(EngineDrainingError):
        engine.add(make_request("b"))
    recorder.run()
    assert recorder.ends("a") == ["length"]


def test_the_receipt_of_a_finished_request_counts_the_tokens_of_all_its_sequences() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("two", 10, max_tokens=3, n=2)))
    while engine.has_work:
        recorder.take(engine.step())
    receipt, result = engine.abort("two")
    assert (receipt.state, receipt.output_tokens, result) == ("finished:length", 6, None)


def test_the_id_of_a_sibling_aborts_its_request() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", n=2, max_tokens=30)))
    recorder.take(engine.step())
    receipt, result = engine.abort("a.1")
    recorder.take(result)
    assert (receipt.request_id, receipt.state) == ("a", "aborted")
    assert recorder.ends("a") == ["abort", "abort"]
