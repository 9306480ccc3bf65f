"""Handlers of the OpenAI-compatible API, and of vLLM's /tokenize, /detokenize and /version."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.access import Role, RouteRow
from app.context import AppContext, context
from app.errors import ApiError
from app.json_body import parse_body, read_body, read_json_object
from app.openai_api.formats import Answer, ChatFormat, CompletionFormat
from app.openai_api.prompts import encode_chat, encode_prompts
from app.openai_api.responses import respond
from app.openai_api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from app.version import VERSION
from engine.engine import Request as EngineRequest
from engine.errors import InvalidValueError, RequestError
from engine.sampling_params import SamplingParams

STARTED_AT = int(time.time())


async def create_completion(request: Request) -> Response:
    """POST /v1/completions."""
    ctx = context(request)
    body = await read_body(request, CompletionBody)
    check_model(ctx, body.model)
    params = body.sampling_params()
    prompts = await encode_prompts(
        ctx.async_engine.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens
    )  # fmt: skip
    answer = _answer(request, ctx, "cmpl", body, params, prompts)
    return await respond(
        request, _engine_requests(answer, body, params), CompletionFormat(answer),
        stream=body.stream, include_usage=body.include_usage, headers=_headers(request, answer),
    )  # fmt: skip


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions."""
    ctx = context(request)
    body = await read_body(request, ChatBody)
    check_model(ctx, body.model)
    params = body.sampling_params()
    prompt = await encode_chat(ctx.async_engine.tokenizer, body)
    answer = _answer(request, ctx, "chatcmpl", body, params, [prompt])
    try:
        return await respond(
            request, _engine_requests(answer, body, params), ChatFormat(answer),
            stream=body.stream, include_usage=body.include_usage, headers=_headers(request, answer),
        )  # fmt: skip
    except RequestError as error:
        if error.param == "prompt":  # the prompt is made of the messages
            error.param = "messages"
        raise


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


def _answer(
    request: Request,
    ctx: AppContext,
    prefix: str,
    body: GenerationBody,
    params: SamplingParams,
    prompts: list[tuple[int, ...]],
) -> Answer:
    state = request.state
    is_given = getattr(state, "is_request_id_given", True)
    answer_id = f"{prefix}-{uuid.uuid4().hex if is_given else state.request_id}"
    state.answer_id = answer_id
    engine = ctx.async_engine
    return Answer(
        answer_id, engine.info.name, engine.tokenizer, tuple(prompts), params.n, params.logprobs, body.return_token_ids
    )


def _engine_requests(answer: Answer, body: GenerationBody, params: SamplingParams) -> list[EngineRequest]:
    one = len(answer.prompts) == 1
    return [
        EngineRequest(
            request_id=answer.id if one else f"{answer.id}-{i}",
            prompt_token_ids=prompt,
            sampling_params=params,
            priority=body.priority,
            queue_timeout_s=body.queue_timeout_s,
            request_timeout_s=body.request_timeout_s,
            cache_salt=body.cache_salt,
            source="v1",
        )
        for i, prompt in enumerate(answer.prompts)
    ]


def _headers(request: Request, answer: Answer) -> dict[str, str]:
    is_given = getattr(request.state, "is_request_id_given", False)
    return {"x-request-id": request.state.request_id if is_given else answer.id}


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    max_model_len: int

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.name,
            "object": "model",
            "created": STARTED_AT,
            "owned_by": "pagedeck",
            "root": self.name,
            "parent": None,
            "max_model_len": self.max_model_len,
        }


def _model(ctx: AppContext) -> _Model:
    info = ctx.async_engine.info
    return _Model(info.name, info.max_model_len)


async def list_models(request: Request) -> Response:
    """GET /v1/models: the one there is."""
    return JSONResponse({"object": "list", "data": [_model(context(request)).as_json()]})


async def get_model(request: Request) -> Response:
    """GET /v1/models/NAME; names may hold slashes."""
    ctx = context(request)
    check_model(ctx, request.path_params["model"])
    return JSONResponse(_model(ctx).as_json())


async def tokenize(request: Request) -> Response:
    """POST /tokenize: token ids of a prompt, or of messages through the chat template."""
    ctx = context(request)
    tokenizer = ctx.async_engine.tokenizer
    value = await read_json_object(request)
    body: TokenizeChatBody | TokenizeTextBody
    if value.get("messages") is not None:
        body = parse_body(value, TokenizeChatBody)
        check_model(ctx, body.model)
        tokens = await encode_chat(tokenizer, body, add_special_tokens=body.add_special_tokens)
    else:
        body = parse_body(value, TokenizeTextBody)
        check_model(ctx, body.model)
        (tokens,) = await encode_prompts(tokenizer, [body.prompt], add_special_tokens=body.add_special_tokens)
    texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return JSONResponse(
        {
            "count": len(tokens),
            "max_model_len": ctx.async_engine.info.max_model_len,
            "tokens": list(tokens),
            "token_strs": texts,
        }
    )


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    ctx = context(request)
    body = await read_body(request, DetokenizeBody)
    check_model(ctx, body.model)
    size = ctx.async_engine.info.vocab_size
    bad = next((token for token in body.tokens if not 0 <= token < size), None)
    if bad is not None:
        raise InvalidValueError("tokens", bad, f"token ids in [0, {size - 1}]")
    return JSONResponse({"prompt": ctx.async_engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def version(request: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": VERSION})


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/v1/models", ("GET",), list_models, Role.INFERENCE, "list_models"),
    RouteRow("/v1/models/{model:path}", ("GET",), get_model, Role.INFERENCE, "get_model"),
    RouteRow("/v1/completions", ("POST",), create_completion, Role.INFERENCE, "create_completion"),
    RouteRow("/v1/chat/completions", ("POST",), create_chat_completion, Role.INFERENCE, "create_chat_completion"),
    RouteRow("/tokenize", ("POST",), tokenize, Role.INFERENCE, "tokenize"),
    RouteRow("/detokenize", ("POST",), detokenize, Role.INFERENCE, "detokenize"),
    RouteRow("/version", ("GET",), version, Role.INFERENCE, "version"),
)
