"""The one path from a checked body to an answer; each API brings its body, its prompts and its format."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from app.context import AppContext, context
from app.errors import ApiError
from app.openai_api.answer import Answer, Format
from app.openai_api.delivery import respond
from app.openai_api.prompts import compile_structured, encode_bad_words
from app.openai_api.results import UsageCount
from app.openai_api.schemas import GenerationBody, SamplingFields
from engine.engine import Request as EngineRequest
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """What an API has made of its body."""

    prefix: str  # of the answer's id
    body: SamplingFields
    params: SamplingParams
    prompts: list[tuple[int, ...]]
    shape: Callable[[Answer], Format]
    is_output_wanted: bool = True


def model_defaults(request: Request) -> Mapping[str, float]:
    """The model's own sampling parameters, for where a client is silent."""
    return dict(context(request).async_engine.info.generation_defaults)


def check_model(ctx: AppContext, model: str | None) -> None:
    """Refuse another model's name; absent means the one there is.

    Raises:
        ApiError: 404.
    """
    name = ctx.async_engine.info.name
    if model and model != name:
        shown = model[:100]
        message = f"the model {shown!r} is not served here; {name!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


async def answer(request: Request, plan: Plan) -> Response:
    """Generate what `plan` says.

    Raises:
        EngineError, ApiError, ClientDisconnect: see `delivery.respond`.
    """
    engine, body, params = context(request).async_engine, plan.body, plan.params
    if body.bad_words:
        params = replace(params, bad_words=await encode_bad_words(engine.tokenizer, body.bad_words))
    params.validate(engine.info.vocab_size)  # before work is put into a schema
    grammar = await compile_structured(engine.grammars, params.structured)
    about = _answer(request, plan, params)
    requests = [
        EngineRequest(
            request_id=about.id if len(plan.prompts) == 1 else f"{about.id}-{i}",
            prompt_token_ids=prompt,
            sampling_params=params,
            priority=body.priority,
            queue_timeout_s=body.queue_timeout_s,
            request_timeout_s=body.request_timeout_s,
            cache_salt=body.cache_salt,
            source="v1",
            grammar=grammar,
        )
        for i, prompt in enumerate(plan.prompts)
    ]
    usage = UsageCount(sum(map(len, plan.prompts)), is_output_wanted=plan.is_output_wanted)
    is_given = getattr(request.state, "is_request_id_given", False)
    headers = {"x-request-id": request.state.request_id if is_given else about.id}
    return await respond(request, requests, plan.shape(about), usage, stream=body.stream, headers=headers)


def _answer(request: Request, plan: Plan, params: SamplingParams) -> Answer:
    state, body = request.state, plan.body
    is_given = getattr(state, "is_request_id_given", True)
    name = body.request_id or (uuid.uuid4().hex if is_given else state.request_id)
    state.answer_id = f"{plan.prefix}{name}"
    engine = context(request).async_engine
    about = Answer(
        state.answer_id, engine.info.name, engine.tokenizer, tuple(plan.prompts), params.n, params.logprobs,
        return_timings=body.return_timings,
    )  # fmt: skip
    if not isinstance(body, GenerationBody):
        return about
    return replace(
        about,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
