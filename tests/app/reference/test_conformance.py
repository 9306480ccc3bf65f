"""Requests made of the document itself, right ones and wrong ones: every answer is one that the document names.

Each operation has a server of its own, so that a pause or a drain costs no other operation its answers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi import checks as openapi_checks

from app.reference.document import openapi_document
from app.routes import route_table
from app.settings import Settings
from tests.e2e.load import Console
from tests.helpers.live_app import ADMIN, KEYS, LiveApp, serve

pytestmark = pytest.mark.slow

NUM_EXAMPLES = int(os.environ.get("API_EXAMPLES", "10"))  # of right and of wrong requests each
GENERATING = {"create_chat_completion", "create_completion", "create_response", "create_message"}  # so many times more:
MORE = 3  # theirs are the largest bodies
# What hardly any example gets right, because it names tokens, a grammar or another field; sent without them too.
INTRICATE = {
    "model", "logit_bias", "allowed_token_ids", "stop_token_ids", "response_format", "structured_outputs", "text",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "min_tokens", "top_logprobs", "stream_options",
    "continue_final_message", "chat_template_kwargs", "thinking", "n",
}  # fmt: skip
ENDLESS = {"engine_events"}
DOCUMENT: Any = openapi_document(route_table(is_loopback=True))
OPERATIONS = [
    (entry["operationId"], path, method)
    for path, entries in DOCUMENT["paths"].items()
    for method, entry in entries.items()
    if entry["operationId"] not in ENDLESS
]
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}
RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


def paused(live: LiveApp) -> None:
    """Single steps are for a paused engine."""
    status, _ = Console(live.address).call("POST", "/admin/api/engine/pause", {"reason": "steps"}, **AS_ADMIN)
    assert status == 200


PREPARE: dict[str, Callable[[LiveApp], None]] = {"step": paused}


@pytest.mark.parametrize(("name", "path", "method"), OPERATIONS, ids=[name for name, _, _ in OPERATIONS])
def test_every_answer_is_one_that_the_document_names(name: str, path: str, method: str) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    has_input = bool({"parameters", "requestBody"} & set(DOCUMENT["paths"][path][method]))
    options = {"num_blocks": 32, "max_model_len": 128, "max_num_queued_reqs": 64, "request_timeout_s": 2.0}
    answered: Counter[int] = Counter()
    with serve(Settings(port=0, api_key=KEYS), **options) as live:
        PREPARE.get(name, lambda _: None)(live)

        def check(case: schemathesis.Case) -> None:
            response = case.call(base_url=live.address, headers=AS_ADMIN, timeout=20)
            case.validate_response(response, checks=CHECKS)
            answered[response.status_code] += 1
            if name in GENERATING and isinstance(case.body, dict) and INTRICATE & set(case.body):
                case.body = {field: value for field, value in case.body.items() if field not in INTRICATE}
                check(case)

        for mode in (RIGHT, WRONG) if has_input else (RIGHT,):
            num_examples = NUM_EXAMPLES * (MORE if name in GENERATING else 1)
            run(operation.as_strategy(generation_mode=mode), check, num_examples)
        status, state = Console(live.address).call("GET", "/admin/api/state", **AS_ADMIN)
        assert status == 200
        assert state["dead"] is None
        assert not live.engine.is_dead
    if name in GENERATING:
        assert answered[200] >= NUM_EXAMPLES


def run(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], num_examples: int) -> None:
    """Hold `check` against that many examples, the same ones each time."""
    suppressed = list(HealthCheck)

    @seed(4)
    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=suppressed)
    @given(strategy)
    def every(case: Any) -> None:
        check(case)

    every()
