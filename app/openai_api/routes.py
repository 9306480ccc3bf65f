"""Handlers of the OpenAI-compatible API, and of vLLM's /tokenize, /detokenize and /version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.access import Role, RouteRow
from app.context import AppContext, context
from app.errors import ApiError, error_of
from app.json_body import parse_body, read_body, read_json_object
from app.openai_api.answer import Answer
from app.openai_api.formats import ChatFormat, CompletionFormat
from app.openai_api.handling import Plan, answer, check_model, model_defaults
from app.openai_api.messages_api import CountTokensBody, MessagesBody, MessagesFormat, messages_error
from app.openai_api.prompts import encode_chat, encode_prompts
from app.openai_api.responses_api import ResponsesBody, ResponsesFormat
from app.openai_api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from app.version import VERSION
from engine.errors import EngineError, InvalidValueError, RequestError

STARTED_AT = int(time.time())


async def create_completion(request: Request) -> Response:
    """POST /v1/completions."""
    ctx = context(request)
    body = await read_body(request, CompletionBody)
    check_model(ctx, body.model)
    tokenizer = ctx.async_engine.tokenizer
    params = body.sampling_params(model_defaults(request))
    prompts = await encode_prompts(tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)
    echo: list[str] = []
    if body.echo:
        echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompt]

    def shape(about: Answer) -> CompletionFormat:
        return CompletionFormat(about, echo, is_echo_only=body.is_echo_only)

    plan = Plan("cmpl-", body, params, prompts, shape, is_output_wanted=not body.is_echo_only)
    return await answer(request, plan)


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions."""
    ctx = context(request)
    body = await read_body(request, ChatBody)
    check_model(ctx, body.model)
    params = body.sampling_params(model_defaults(request))
    prompt = await encode_chat(ctx.async_engine.tokenizer, body)
    with renamed({"prompt": "messages"}):  # the prompt is made of the messages
        return await answer(request, Plan("chatcmpl-", body, params, [prompt], ChatFormat))


async def create_response(request: Request) -> Response:
    """POST /v1/responses, in its text form."""
    ctx = context(request)
    body = await read_body(request, ResponsesBody)
    check_model(ctx, body.model)
    params = body.sampling_params(model_defaults(request))
    with renamed({"messages": "input", "prompt": "input", "logprobs": "top_logprobs"}):
        prompt = await encode_chat(ctx.async_engine.tokenizer, body.chat())
        plan = Plan("resp_", body, params, [prompt], lambda about: ResponsesFormat(about, body))
        return await answer(request, plan)


async def create_message(request: Request) -> Response:
    """POST /v1/messages, in its text form. Errors have Anthropic's `type` around them."""
    ctx = context(request)
    try:
        body = await read_body(request, MessagesBody)
        check_model(ctx, body.model)
        params = body.sampling_params(model_defaults(request))
        with renamed({"prompt": "messages", "stop": "stop_sequences"}):
            prompt = await encode_chat(ctx.async_engine.tokenizer, body.chat())
            return await answer(request, Plan("msg_", body, params, [prompt], MessagesFormat))
    except (ApiError, EngineError) as error:
        return messages_error(error_of(error))


async def count_message_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    ctx = context(request)
    try:
        body = await read_body(request, CountTokensBody)
        check_model(ctx, body.model)
        prompt = await encode_chat(ctx.async_engine.tokenizer, body.chat())
        return JSONResponse({"input_tokens": len(prompt)})
    except (ApiError, EngineError) as error:
        return messages_error(error_of(error))


async def not_a_pooling_model(request: Request) -> Response:
    """Embeddings, pooling and scores: this engine generates text."""
    name = context(request).async_engine.info.name
    raise ApiError(
        400, f"the model {name!r} generates text; it cannot do {request.url.path.rpartition('/')[2]}",
        param="model", code="unsupported_by_model",
    )  # fmt: skip


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields at fault as this API does."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


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
    RouteRow("/v1/responses", ("POST",), create_response, Role.INFERENCE, "create_response"),
    RouteRow("/v1/messages", ("POST",), create_message, Role.INFERENCE, "create_message"),
    RouteRow("/v1/messages/count_tokens", ("POST",), count_message_tokens, Role.INFERENCE, "count_message_tokens"),
    *(
        RouteRow(path, ("POST",), not_a_pooling_model, Role.INFERENCE, path.strip("/").replace("/", "_"))
        for path in ("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/classify")
    ),
    RouteRow("/tokenize", ("POST",), tokenize, Role.INFERENCE, "tokenize"),
    RouteRow("/detokenize", ("POST",), detokenize, Role.INFERENCE, "detokenize"),
    RouteRow("/version", ("GET",), version, Role.INFERENCE, "version"),
)
