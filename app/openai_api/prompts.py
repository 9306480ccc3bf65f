"""Text, messages and schemas to what the engine takes: off its thread, and off the event loop where it takes long."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from app.openai_api.schemas import ChatFields, Prompt, text_of_final_message
from engine.errors import InvalidValueError
from engine.sampling_params import StructuredSpec
from engine.structured.grammars import Grammar, Grammars
from engine.tokenizer.chat_template import ChatTemplateError
from engine.tokenizer.tokenizer import Tokenizer

LONG_TEXT = 8192  # characters from which a worker thread does it: about a millisecond of work
MAX_WORKERS = 4
MAX_COMPILE_S = 30.0  # the work itself is limited too, see engine.structured; this is for a machine that is busy

T = TypeVar("T")
_RESERVED_KWARGS = frozenset({"self", "messages", "add_generation_prompt"})


async def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], *, add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """Token ids of each prompt; ids are passed on as they are (the engine checks them against the vocabulary)."""

    def encode() -> list[tuple[int, ...]]:
        return [
            tuple(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in prompts
        ]

    return await _run(encode, sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))


async def encode_chat(tokenizer: Tokenizer, body: ChatFields, *, add_special_tokens: bool = False) -> tuple[int, ...]:
    """Token ids of a conversation; the template has written the special tokens already.

    Raises:
        RequestError: the template refuses the messages, or there is no last message to continue.
    """

    def encode() -> tuple[int, ...]:
        text = render(tokenizer, body)
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return await _run(encode, _num_characters(body.messages))


def render(tokenizer: Tokenizer, body: ChatFields) -> str:
    """The prompt's text.

    Raises:
        RequestError: see `encode_chat`.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    reserved = _RESERVED_KWARGS.intersection(kwargs)
    if reserved:
        raise InvalidValueError("chat_template_kwargs", sorted(reserved), "names of the template's own variables")
    if not body.continue_final_message:
        return tokenizer.render_chat(body.messages, add_generation_prompt=body.add_generation_prompt, **kwargs)
    # Templates trim and close the last message: mark where its text ends, and cut there.
    mark = uuid.uuid4().hex
    final_text = text_of_final_message(body.messages)
    messages = [*body.messages[:-1], {**body.messages[-1], "content": final_text + mark}]
    before, found, _ = tokenizer.render_chat(messages, add_generation_prompt=False, **kwargs).rpartition(mark)
    if not found:
        raise ChatTemplateError("this model's chat template does not show the last message, so it cannot go on from it")
    return before


async def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that a word may come as: at the start of a text or a line, and after a space."""

    def encode() -> tuple[tuple[int, ...], ...]:
        spellings = [text for word in words for text in (word.lstrip(" "), " " + word.lstrip(" ")) if word.strip()]
        found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    return await _run(encode, sum(map(len, words)))


async def compile_structured(grammars: Grammars, spec: StructuredSpec | None) -> Grammar | None:
    """What `spec` asks for, compiled on a worker thread; None for None.

    Raises:
        InvalidValueError: it is wrong, or too much work.
    """
    if spec is None:
        return None
    grammar = grammars.find(spec)
    if grammar is not None:
        return grammar
    try:
        async with asyncio.timeout(MAX_COMPILE_S):
            return await anyio.to_thread.run_sync(
                grammars.compile, spec, abandon_on_cancel=True, limiter=_limiter(_compilers_of_loop)
            )
    except TimeoutError:
        limit = f"something that compiles within {MAX_COMPILE_S:g} s"
        raise InvalidValueError(spec.param, f"{len(spec.text)} characters", limit) from None


def _num_characters(messages: Sequence[dict[str, object]]) -> int:
    total = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        total += sum(len(part) if isinstance(part, str) else len(str(part)) for part in parts)
    return total


async def _run(work: Callable[[], T], num_characters: int) -> T:
    if num_characters < LONG_TEXT:
        return work()
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=_limiter(_limiter_of_loop))


_limiter_of_loop: RunVar[anyio.CapacityLimiter] = RunVar("prompt_workers")
_compilers_of_loop: RunVar[anyio.CapacityLimiter] = RunVar("grammar_workers")


def _limiter(variable: RunVar[anyio.CapacityLimiter]) -> anyio.CapacityLimiter:
    """The event loop's own limiter: work of one kind queues for workers among itself."""
    limiter = variable.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_WORKERS)
        variable.set(limiter)
    return limiter
