"""Fifty schemas, regexes, choices and grammars, of the kinds that clients send; for the bench and for the tests."""

from __future__ import annotations

import json
from typing import Any

from engine.sampling_params import StructuredSpec

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


_TEXT: Schema = {"type": "string", "maxLength": 40}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 9999}
_FLAG: Schema = {"type": "boolean"}
_TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": _object(value=_COUNT, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
    },
}

SCHEMAS: tuple[Schema, ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 1, "maximum": 12},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "maxLength": 30},
    {"type": "string", "minLength": 5, "maxLength": 12},
    {"type": "string", "enum": ["red", "green", "blue"]},
    {"enum": ["yes", 1, None, True, {"a": 1}]},
    {"const": "exactly this"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    {"type": ["string", "null"], "maxLength": 20},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 10}]},
    _object(name=_TEXT),
    _object(name=_TEXT, age=_COUNT, is_tall=_FLAG),
    _object(city=_TEXT, country={"enum": ["CZ", "DE", "FR", "JP"]}, population=_COUNT),
    _object(person=_object(first=_TEXT, last=_TEXT), address=_object(street=_TEXT, number=_COUNT)),
    {**_object(a=_TEXT, b=_COUNT, c=_FLAG), "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3, "maxItems": 3},
    {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 6},
    {"type": "array", "items": _object(id=_COUNT, label=_TEXT), "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [_TEXT, _COUNT, _FLAG], "items": False, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": _COUNT, "maxItems": 2}, "maxItems": 2},
    _TREE,
    {"anyOf": [_object(kind={"const": "circle"}, radius=_COUNT), _object(kind={"const": "square"}, side=_COUNT)]},
    _object(tool={"enum": ["search", "open"]}, arguments=_object(query=_TEXT, limit=_COUNT)),
    _object(日本=_TEXT, čeština=_FLAG),
)  # fmt: skip

REGEXES: tuple[str, ...] = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"\(\d{3}\) \d{3}-\d{4}",
    r"(yes|no|maybe)",
    r"[A-Za-z ]{10,30}\.",
    r"#[0-9a-f]{6}",
    r"[\p{Hiragana}]{3,8}",
    r"([a-z]+, ){2}and [a-z]{1,12}",
)

CHOICES: tuple[tuple[str, ...], ...] = (
    ("positive", "negative", "neutral"),
    ("a", "ab", "abc", "abcd"),
    ("はい", "いいえ", "👨‍👩‍👧‍👦"),
)

GRAMMARS: tuple[tuple[str, str], ...] = (  # (grammar, a regex that its sentences match)
    ('start: "SELECT " COLUMN " FROM " COLUMN\nCOLUMN: /[a-z]{1,8}/', r"SELECT [a-z]{1,8} FROM [a-z]{1,8}"),
    ('root ::= item item\nitem ::= "- " [a-z ]+ "\\n"', r"(- [a-z ]+\n){2}"),
    ('start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/', r"[0-9]{1,3}(\+[0-9]{1,3})*"),
    ('root ::= "[" ("x" | "y") ("," ("x" | "y"))* "]"', r"\[[xy](,[xy])*\]"),
)


def specs() -> list[StructuredSpec]:
    """All of them, in the order above."""
    return [
        *(StructuredSpec("json_schema", json.dumps(schema)) for schema in SCHEMAS),
        *(StructuredSpec("regex", regex) for regex in REGEXES),
        *(StructuredSpec("choice", json.dumps(choices)) for choices in CHOICES),
        *(StructuredSpec("grammar", grammar) for grammar, _ in GRAMMARS),
    ]
