"""The page of the API: what the document says, laid out for people, with examples that can be run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from app.context import context
from app.reference.document import described, openapi_document, plain_path
from app.reference.operation import Operation

Json = Mapping[str, Any]
_WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "object"}


@dataclass(frozen=True, slots=True)
class FieldView:
    """A field or a parameter as a row."""

    name: str
    type: str
    default: str  # "" for none
    is_required: bool
    text: str


@dataclass(frozen=True, slots=True)
class OperationView:
    """One operation as a section of the page."""

    name: str
    method: str
    path: str
    summary: str
    text: str
    role: str
    may_run: bool  # whether this caller's role may
    effect: str
    is_endless: bool
    can_stream: bool
    parameters: tuple[tuple[str, FieldView, str], ...]  # (path, query or header; the field; an example)
    bodies: tuple[tuple[str, tuple[FieldView, ...]], ...]  # (title, fields); several: one of them
    answer: tuple[FieldView, ...]
    statuses: tuple[tuple[str, str], ...]
    example: str  # the body's JSON


async def api_page(request: Request) -> Response:
    """GET /api: the API, with examples."""
    from app.routes import route_table  # here: the table holds this page

    ctx = context(request)
    rows = route_table(is_loopback=ctx.settings.is_loopback())
    document: Any = await anyio.to_thread.run_sync(openapi_document, rows)
    groups: dict[str, list[OperationView]] = {}
    for row, operation in described(rows):
        for method in row.methods:
            entry = document["paths"][plain_path(row.path)][method.lower()]
            may_run = request.state.role.may(row.role)
            view = _view(method, plain_path(row.path), entry, operation, document, may_run, ctx.async_engine.info.name)
            groups.setdefault(operation.tag, []).append(view)
    return ctx.templates.render(
        request, "api/api.html", "API", "api", groups=groups, needs_key=not ctx.console.keys.is_empty
    )


def _view(
    method: str, path: str, entry: Json, operation: Operation, document: Json, may_run: bool, model: str
) -> OperationView:
    schemas = document["components"]["schemas"]
    body = entry.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    success = entry["responses"][str(operation.status)]["content"]
    return OperationView(
        name=entry["operationId"],
        method=method,
        path=path,
        summary=entry["summary"],
        text=entry["description"],
        role=entry["x-role"],
        may_run=may_run,
        effect=operation.effect,
        is_endless=operation.is_endless,
        can_stream="text/event-stream" in success,
        parameters=tuple(
            (
                parameter["in"],
                FieldView(
                    parameter["name"],
                    type_text(parameter["schema"], schemas),
                    "",
                    parameter["required"],
                    parameter["description"],
                ),
                given.example.replace("{model}", model),
            )
            for parameter, given in zip(entry.get("parameters", ()), operation.parameters, strict=True)
        ),
        bodies=tuple((_title(option), tuple(_fields(option, schemas))) for option in _options(body, schemas) if option),
        answer=tuple(_fields(_resolved(success.get("application/json", {}).get("schema", {}), schemas), schemas)),
        statuses=tuple((status, answer["description"]) for status, answer in entry["responses"].items()),
        example="" if operation.example is None else _pretty(operation.example),
    )


def _pretty(example: Json) -> str:
    """Indented JSON with lists of numbers on one line."""
    text = json.dumps(example, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def _options(schema: Json, schemas: Json) -> list[Json]:
    """The schemas of which one must fit."""
    return [_resolved(option, schemas) for option in schema.get("anyOf", [schema] if schema else [])]


def _resolved(schema: Json, schemas: Json) -> Json:
    reference = schema.get("$ref")
    found: Json = schemas[reference.rsplit("/", 1)[1]] if reference else schema
    return found


def _title(schema: Json) -> str:
    """What tells one of several bodies from the others: its first required field."""
    return next(iter(schema.get("required", ())), "")


def _fields(schema: Json, schemas: Json) -> Iterator[FieldView]:
    required = schema.get("required", ())
    items = schema.get("properties", {}).items()
    for name, spec in sorted(items, key=lambda item: item[0] not in required):  # what must be there first
        default = spec.get("default")
        yield FieldView(
            name,
            type_text(spec, schemas),
            "" if default is None else json.dumps(default, ensure_ascii=False),
            name in required,
            spec.get("description", ""),
        )


def type_text(schema: Json, schemas: Json, *, with_bounds: bool = True) -> str:
    """A JSON schema in a few words: `integer >= 1`, `text or list of text`."""
    if "$ref" in schema:
        found = _resolved(schema, schemas)
        return "object" if found.get("type") == "object" else type_text(found, schemas)
    if "anyOf" in schema:
        texts = [type_text(option, schemas) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(texts))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next(name for name in kind if name != "null")
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}), schemas, with_bounds=False)}"
    bounds = " and ".join(_bounds(schema)) if with_bounds else ""
    return f"{_WORDS.get(str(kind), 'anything')} {bounds}".strip()


def _bounds(schema: Json) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if abs(low or 0) >= 2**63 - 1:  # what fits 64 bits is no news
        low = high = None
    if "exclusiveMinimum" in schema:
        yield f"> {schema['exclusiveMinimum']:g}"
    if low is not None and high is not None:
        yield f"{low:g} to {high:g}"
    elif low is not None:
        yield f">= {low:g}"
    elif high is not None:
        yield f"<= {high:g}"
