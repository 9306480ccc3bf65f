"""The chat page's API: make a generation, follow it, stop it. Not for other clients: those have /v1."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.context import AppContext, context
from app.errors import ApiError
from app.json_body import Body, parse_body, read_body
from app.openai_api.prompts import encode_chat
from app.openai_api.schemas import ChatBody, ChatFields
from app.playground.generations import Generation
from app.playground.stream import Reader
from app.sse import EventStream
from engine.errors import RequestTooLongError

CLIENT_ID = r"^[A-Za-z0-9_-]{8,64}$"
PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "ignore_eos", "min_tokens",
)  # fmt: skip

ClientId = Annotated[str, Field(pattern=CLIENT_ID)]


class GenerationBody(Body):
    """POST /chat/api/generations."""

    client_id: ClientId
    messages: list[dict[str, Any]]
    params: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False


class _StreamQuery(Body):
    client_id: ClientId


async def create(request: Request) -> Response:
    """POST /chat/api/generations: 201 with the id under which the text can be had."""
    ctx = context(request)
    body = await read_body(request, GenerationBody)
    params = {name: body.params[name] for name in PARAMS if name in body.params}
    chat = parse_body({"messages": body.messages, **params, **_prompt_end(body)}, ChatBody)
    token_ids = await encode_chat(ctx.async_engine.tokenizer, chat)
    max_context = _max_context(ctx)
    if len(token_ids) + 1 > max_context:
        raise _too_long(len(token_ids), max_context)
    try:
        generation = await ctx.console.generations.create(body.client_id, token_ids, chat.sampling_params())
    except RequestTooLongError as error:  # the pool has shrunk meanwhile
        raise _too_long(len(token_ids), _max_context(ctx)) from error
    return JSONResponse(
        {
            "generation_id": generation.generation_id,
            "request_id": generation.request_id,
            "num_prompt_tokens": generation.num_prompt_tokens,
            "max_context": max_context,
        },
        status_code=201,
    )


async def stream(request: Request) -> Response:
    """GET /chat/api/stream?client_id=X: all of a browser's generations on one stream, see `app.playground.stream`."""
    query = parse_body({"client_id": request.query_params.get("client_id")}, _StreamQuery)
    streams = context(request).console.chat_streams
    return EventStream(streams.stream(Reader(query.client_id)), "chat stream")


async def read(request: Request) -> Response:
    """GET /chat/api/generations/ID: the whole text so far, and how it stands."""
    generation = _generation(request)
    return JSONResponse(context(request).console.chat_streams.snapshot(generation))


async def stop(request: Request) -> Response:
    """DELETE /chat/api/generations/ID: stop it; a receipt, the same again when asked again."""
    receipt = await context(request).console.generations.stop(_generation(request))
    return JSONResponse({"ok": True, **asdict(receipt)})


async def tokenize(request: Request) -> Response:
    """POST /chat/api/tokenize: how long a conversation is, counted by the model's own tokenizer."""
    ctx = context(request)
    body = await read_body(request, ChatFields)
    token_ids = await encode_chat(ctx.async_engine.tokenizer, body)
    return JSONResponse({"num_prompt_tokens": len(token_ids), "max_context": _max_context(ctx)})


def _prompt_end(body: GenerationBody) -> dict[str, bool]:
    if not body.continue_final_message:
        return {}
    return {"continue_final_message": True, "add_generation_prompt": False}


def _generation(request: Request) -> Generation:
    generation = context(request).console.generations.get(request.path_params["generation_id"])
    if generation is None:
        raise ApiError(
            404, "this generation is not kept any more, or never was", param="generation_id", code="not_found"
        )
    return generation


def _max_context(ctx: AppContext) -> int:
    """Longest sequence, prompt and answer: by the model and by the pool as it is limited now."""
    engine = ctx.async_engine
    return min(engine.info.max_model_len, engine.state.limits.num_usable_blocks * engine.info.block_size)


def _too_long(num_prompt_tokens: int, max_context: int) -> ApiError:
    return ApiError(
        400,
        f"the conversation has {num_prompt_tokens:,} tokens; with at least 1 token of answer it exceeds the "
        f"{max_context:,} that fit",
        param="messages",
        code="context_length_exceeded",
        extra={"num_prompt_tokens": num_prompt_tokens, "max_context": max_context},
    )
