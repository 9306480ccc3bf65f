"""Messages to prompt text, through the model's own Jinja template.

The template comes out of a model file, which nobody has read: it runs in Jinja's immutable sandbox, and whatever it
raises becomes a `ChatTemplateError` that costs one request. The environment offers what templates on the hub expect
(block trimming, `break`/`continue`, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML characters alone,
`{% generation %}` blocks); tests compare it with transformers' rendering.

Knows nothing of tokens. Thread-safe: a compiled template keeps no state between renderings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")

# What a template can raise besides Jinja's own errors: it computes on values of the request.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_PROBE = "probe4f1c"


class ChatTemplateError(RequestError):
    """The messages cannot be rendered with this model's template; the message says why."""

    param = "messages"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the template's notion of "today" is local time


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template; `special_tokens` (such as "bos_token") are variables it may use.

    A template that does not compile is kept with its error, so that the model still serves plain completions.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template: jinja2.Template | None = None
        self._compile_error = ""
        try:
            self._template = _environment().from_string(source)
        except _TEMPLATE_FAULTS as error:
            self._compile_error = str(error)
        self._knows_developer = re.search(r"\bdeveloper\b", source) is not None
        self.takes_strings = self._shows_probe(_PROBE)
        self.takes_parts = self._shows_probe([{"type": "text", "text": _PROBE}])

    def _shows_probe(self, content: object) -> bool:
        """Whether a user message with such content comes out as its text (a printed Python list does not count)."""
        if self._template is None:
            return False
        message = {"role": "user", "content": content}
        try:
            text = self._template.render(messages=[message], add_generation_prompt=False, **self._special_tokens)
        except _TEMPLATE_FAULTS:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        """The prompt's text. `kwargs` (such as `tools`) are passed to the template.

        Content is a string or a list of text parts; parts are joined with line ends for templates that take strings
        only. A developer message is a system message where the template does not know the role.

        Raises:
            ChatTemplateError: for messages of the wrong form, and for whatever the template raises.
        """
        if self._template is None:
            raise ChatTemplateError(f"this model's chat template does not compile: {self._compile_error}")
        if not messages:
            raise ChatTemplateError("messages must have at least one message")
        prepared = [self._prepare(index, message) for index, message in enumerate(messages)]
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        variables |= {"messages": prepared, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(f"this model's chat template refuses these messages: {_reason(error)}") from error

    def _prepare(self, index: int, message: Mapping[str, object]) -> dict[str, object]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"{where} must be an object")
        role = message.get("role")
        if role not in ROLES:
            raise ChatTemplateError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
        prepared = {key: value for key, value in message.items() if value is not None}
        if role == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        prepared["content"] = self._content(where, role, message.get("content"))
        if "tool_calls" in prepared:
            prepared["tool_calls"] = _tool_calls(where, prepared["tool_calls"])
        return prepared

    def _content(self, where: str, role: object, content: object) -> object:
        if content is None and role == "assistant":
            content = ""  # an answer that was only tool calls
        if isinstance(content, str):
            return content if self.takes_strings or not self.takes_parts else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise ChatTemplateError(f"{where}.content must be a string or a list of text parts")
        texts = [_part_text(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
        if self.takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ChatTemplateError(f"{where} must be a text part")
    if part.get("type", "text") != "text":
        raise ChatTemplateError(f"{where} is of type {part.get('type')!r}; this model takes text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.text must be a string")
    return text


def _tool_calls(where: str, calls: object) -> list[object]:
    """The calls with their arguments as objects: the API carries them as JSON text, templates expect mappings."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise ChatTemplateError(f"{where}.tool_calls must be a list")
    prepared: list[object] = []
    for number, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise ChatTemplateError(f"{where}.tool_calls[{number}] must be an object with a function")
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise ChatTemplateError(f"{where}.tool_calls[{number}].function.arguments is not JSON") from None
        prepared.append({**call, "function": function})
    return prepared


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
