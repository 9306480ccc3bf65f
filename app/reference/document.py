"""The OpenAPI document, made of the table of routes and of the schemas that check requests.

A route is in it, or is named in `NOT_DESCRIBED` with the reason; a test holds the two against the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal

from pydantic import TypeAdapter

from app.access import Role, RouteRow
from app.auth import COOKIE
from app.reference import console_operations, v1_operations
from app.reference.fields import ACCEPTED, FIELDS, FIELDS_OF
from app.reference.operation import Json, Operation, Parameter
from app.version import VERSION

OPERATIONS: dict[str, Operation] = {
    operation.row: operation for operation in (*v1_operations.OPERATIONS, *console_operations.OPERATIONS)
}

# Rows that are no part of the API: names of `RouteRow`.
NOT_DESCRIBED: dict[str, str] = {
    **dict.fromkeys(("chat_page", "engine_page", "admin_page", "api_page", "audit_rows", "key_rows"), "a page"),
    **dict.fromkeys(("request_page", "request_fragment"), "a page"),
    **dict.fromkeys(("login_form", "login", "logout"), "for browsers"),
    **dict.fromkeys(("static", "favicon"), "files"),
    **dict.fromkeys(
        ("create_generation", "read_generation", "stop_generation", "chat_stream", "tokenize_chat"),
        "the chat page's own, see app/README.md; other clients have /v1",
    ),
    **dict.fromkeys(
        ("v1_embeddings", "pooling", "score", "v1_score", "rerank", "v1_rerank", "classify"),
        "refused: the model generates text",
    ),
}

_REF = "#/components/schemas/{model}"
_STATUS = {
    200: "OK", 201: "Created", 400: "the request is wrong: `param` names the field", 401: "a key is needed",
    403: "the key's role may not do this, or the host or origin is not allowed", 408: "the body took too long",
    413: "the body is too large", 500: "a fault of the server; its log says which", 503: "the model is being loaded",
}  # fmt: skip

Mode = Literal["validation", "serialization"]


def plain_path(path: str) -> str:
    """`/steps/{step}` of Starlette's `/steps/{step:int}`."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def described(rows: Iterable[RouteRow]) -> Iterator[tuple[RouteRow, Operation]]:
    """The rows that are part of the API, in the order in which they are described."""
    by_name = {row.name: row for row in rows}
    for name, operation in OPERATIONS.items():
        if name in by_name:
            yield by_name[name], operation


@lru_cache(maxsize=4)
def openapi_document(rows: tuple[RouteRow, ...], root_path: str = "") -> Json:
    """OpenAPI 3.2 (the first that can describe the events of a stream) of these routes; shared, so read only."""
    listed = list(described(rows))
    schemas, definitions = _schemas(operation for _, operation in listed)
    paths: dict[str, Json] = {}
    for row, operation in listed:
        entry = _operation(row, operation, schemas)
        for method in row.methods:
            paths.setdefault(plain_path(row.path), {})[method.lower()] = entry
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "pagedeck",
            "version": VERSION,
            "description": "OpenAI's API as far as it is there, vLLM's additions, and the admin API of one engine.",
        },
        "servers": [{"url": root_path or "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for _, operation in listed)],
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key; none on loopback without keys"},
                "bare_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same"},
                "login": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "What /admin/login gives"},
            },
        },
    }


# ---- schemas -------------------------------------------------------------------------------------------------------


def _schemas(operations: Iterable[Operation]) -> tuple[dict[tuple[type, Mode], Json], dict[str, Any]]:
    wanted: dict[tuple[type, Mode], None] = {}
    for operation in operations:
        wanted.update({(body, "validation"): None for body in operation.body})
        for answer in (operation.answer, operation.event, operation.error):
            if answer is not None:
                wanted[answer, "serialization"] = None
    inputs = [(kind, mode, TypeAdapter[Any](kind)) for kind, mode in wanted]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    definitions: dict[str, Any] = shared["$defs"]
    for name, schema in definitions.items():
        _tell(name, schema)
    return {(kind, mode): found[kind, mode] for kind, mode in wanted}, definitions


def _tell(name: str, schema: dict[str, Any]) -> None:
    """Add what the models do not know: meanings, ranges, and what a validator accepts before it rewrites it."""
    is_body = name.endswith("Body") or name == "StreamOptions"
    for field, spec in schema.get("properties", {}).items():
        spec.pop("title", None)
        if not is_body:
            continue
        accepted = ACCEPTED.get((name, field)) or ACCEPTED.get(("*", field))
        if accepted is not None:
            _replace_type(spec, accepted)
        told = FIELDS_OF.get((name, field)) or FIELDS.get(field)
        if told is not None:
            spec["description"] = told.text
            _narrow(spec, told.schema)


def _replace_type(spec: dict[str, Any], accepted: Json) -> None:
    is_nullable = any(option.get("type") == "null" for option in spec.get("anyOf", ()))
    for keyword in ("type", "items", "anyOf", "maxItems", "minItems", "additionalProperties", "propertyNames"):
        spec.pop(keyword, None)
    spec.update({"anyOf": [accepted, {"type": "null"}]} if is_nullable else accepted)


def _narrow(spec: dict[str, Any], keywords: Json) -> None:
    if not keywords:
        return
    options = [option for option in spec.get("anyOf", [spec]) if option.get("type") in ("integer", "number")]
    for option in options:
        option.update(keywords)


# ---- operations ----------------------------------------------------------------------------------------------------


def _operation(row: RouteRow, operation: Operation, schemas: dict[tuple[type, Mode], Json]) -> Json:
    entry: Json = {
        "operationId": row.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.description or operation.summary,
        "x-role": row.role.label,
        "security": [] if row.role is Role.OPEN else [{"key": []}, {"bare_key": []}, {"login": []}],
        "responses": _responses(row, operation, schemas),
    }
    if operation.parameters:
        entry["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if operation.body or operation.body_schema is not None:
        bodies = [schemas[body, "validation"] for body in operation.body]
        schema = operation.body_schema or (bodies[0] if len(bodies) == 1 else {"anyOf": bodies})
        content: Json = {"schema": schema}
        if operation.example is not None:
            content["example"] = operation.example
        entry["requestBody"] = {"required": operation.body_required, "content": {"application/json": content}}
    if operation.effect:
        entry["x-effect"] = operation.effect
    if operation.is_endless:
        entry["x-endless"] = True
    return entry


def _parameter(parameter: Parameter) -> Json:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.required,
        "description": parameter.description,
        "schema": dict(parameter.schema),
    }


def _responses(row: RouteRow, operation: Operation, schemas: dict[tuple[type, Mode], Json]) -> Json:
    answer: Any = operation.answer_schema
    if operation.answer is not None:
        answer = schemas[operation.answer, "serialization"]
    content: Json = {} if answer is None else {"application/json": {"schema": answer}}
    if operation.text == "text/plain":  # the second as Prometheus asks for it
        content |= {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
    if operation.event is not None:
        error_event = [] if operation.is_endless else [schemas[operation.error, "serialization"]]
        content["text/event-stream"] = _events([schemas[operation.event, "serialization"], *error_event], operation)
    responses: Json = {str(operation.status): {"description": _STATUS[operation.status], "content": content}}
    for status, why in operation.failures.items():
        responses[str(status)] = {"description": why, "content": content}
    error: Json = {"application/json": {"schema": schemas[operation.error, "serialization"]}}
    for status, why in sorted(_errors(row, operation).items()):
        responses.setdefault(str(status), {"description": why, "content": error})
    return responses


def _events(data: list[Json], operation: Operation) -> Json:
    """A stream of events whose data is JSON."""
    fits: Json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": data}}
    last: list[Json] = [{"const": "[DONE]"}] if operation.is_closed_by_done and not operation.is_endless else []
    event: Json = {"type": "string", "anyOf": [*last, fits]}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": event}}}


def _errors(row: RouteRow, operation: Operation) -> dict[int, str]:
    statuses = {403: _STATUS[403], 500: _STATUS[500], 503: _STATUS[503]}
    if row.role is not Role.OPEN:
        statuses[401] = _STATUS[401]
    if operation.body or operation.body_schema is not None:
        statuses |= {status: _STATUS[status] for status in (400, 408, 413)}
    if any(parameter.where == "query" for parameter in operation.parameters):
        statuses[400] = _STATUS[400]
    if any(parameter.where == "path" for parameter in operation.parameters):
        statuses[404] = "no such path"
    return statuses | dict(operation.errors)
