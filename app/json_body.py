"""Reading a JSON body: whatever is wrong with it is a 400 that says what, never a 500.

Parsed by pydantic's parser, which refuses NaN and infinities, half surrogate pairs, deep nesting and endless numbers;
checked by strict models, where null is the same as absent and unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json
from starlette.requests import Request

from app.errors import ApiError, bad_request

LARGE_BODY_BYTES = 64 * 1024  # parsed in a worker thread from here on

Model = TypeVar("Model", bound="Body")
T = TypeVar("T")


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers_are_integers(cls, data: object) -> object:
        """To JSON 2.0 and 2 are one number, and some clients write every number with a point."""
        if not isinstance(data, Mapping):
            return data
        whole = {
            name: int(value)
            for name, value in data.items()
            if isinstance(value, float) and value.is_integer() and name in _integer_fields(cls)
        }
        return {**data, **whole} if whole else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        required = own.get("required", ())
        for name, spec in own.get("properties", {}).items():
            if name not in required:
                own["properties"][name] = _or_null(spec)
        return schema


@lru_cache
def _integer_fields(model: type[BaseModel]) -> frozenset[str]:
    """The fields of `model` that are an integer, or may be absent."""
    return frozenset(name for name, field in model.model_fields.items() if _is_integer(field.annotation))


def _is_integer(annotation: object) -> bool:
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(annotation)]
    return annotation is int or (int in kinds and set(kinds) <= {int, type(None)})


def _or_null(spec: JsonSchemaValue) -> JsonSchemaValue:
    """The same or null, which is taken for absent."""
    options = spec.get("anyOf")
    if options is not None:
        return spec if {"type": "null"} in options else {**spec, "anyOf": [*options, {"type": "null"}]}
    about: JsonSchemaValue = {name: spec[name] for name in ("title", "default", "description") if name in spec}
    only = {name: value for name, value in spec.items() if name not in about}
    return {"anyOf": [only, {"type": "null"}], **about}


async def read_json_object(request: Request) -> dict[str, Any]:
    """The body's JSON object.

    Raises:
        ApiError: 400 for another content type, for what is no JSON and for JSON that is no object.
    """
    return await _read(request, lambda value: value)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body as `model`.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    return await _read(request, lambda value: parse_body(value, model))


async def _read(request: Request, convert: Callable[[dict[str, Any]], T]) -> T:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        shown = f"not {content_type!r}" if content_type else "which is missing"
        raise bad_request(f"the body must come with Content-Type application/json, {shown}", "content-type")
    body = await request.body()

    def parse() -> T:
        return convert(_parse(body))

    return await anyio.to_thread.run_sync(parse) if len(body) >= LARGE_BODY_BYTES else parse()


def parse_body(value: Mapping[str, Any], model: type[Model]) -> Model:
    """`value` checked against `model`.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", "body") from None


def validation_error(error: ValidationError) -> ApiError:
    """The first fault of a body as a 400."""
    first: ErrorDetails = error.errors(include_url=False, include_context=False)[0]
    place = place_of(first["loc"])
    param = str(first["loc"][0]) if first["loc"] else "body"  # the field; the message says where in it
    if first["type"] == "missing":
        return bad_request(f"{place} is required", param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error":
        # "Input should be ...", "String should have ...": the field is named instead of its kind.
        head, should, rest = message.partition(" should ")
        message = f"{place} should {rest if should else f'be {head}'}, got {_shown(first['input'])}"
    return bad_request(message, param, "invalid_type" if first["type"].endswith("_type") else "invalid_value")


def place_of(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "body"


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", "body", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_json_kind(value)}", "body")
    return value


def _shown(value: object) -> str:
    text = _json_kind(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _json_kind(value: object) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
