"""The ways in which clients ask for structured output: OpenAI's `response_format` and vLLM's fields, as one spec."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from app.json_body import Body
from engine.errors import InvalidValueError
from engine.sampling_params import StructuredSpec

MAX_CHOICES = 1024
ANY_OBJECT = '{"type":"object"}'

Schema = str | dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(Body):
    """OpenAI's `json_schema` object."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format` of chat and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def spec(self) -> StructuredSpec | None:
        """What it asks for.

        Raises:
            InvalidValueError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredSpec("json_schema", ANY_OBJECT, "response_format")
        if self.json_schema is None:
            raise InvalidValueError("response_format", {"type": self.type}, "an object with json_schema.schema")
        return StructuredSpec("json_schema", json.dumps(self.json_schema.json_schema), "response_format")


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of these."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("structural_tag") is not None:
            raise InvalidValueError("structured_outputs", "structural_tag", "json, regex, choice or grammar")
        return data

    def specs(self) -> list[StructuredSpec]:
        """All that are given."""
        given = []
        if self.json_schema is not None:
            given.append(json_spec(self.json_schema, "structured_outputs"))
        if self.regex is not None:
            given.append(StructuredSpec("regex", self.regex))
        if self.choice is not None:
            given.append(StructuredSpec("choice", json.dumps(self.choice)))
        if self.grammar is not None:
            given.append(StructuredSpec("grammar", self.grammar))
        if self.json_object:
            given.append(StructuredSpec("json_schema", ANY_OBJECT))
        return given


def json_spec(schema: Schema, param: str) -> StructuredSpec:
    """A spec of a schema, which may be JSON text."""
    return StructuredSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema), param)


class StructuredFields(Body):
    """Fields of vLLM that bodies share."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def structured_spec(self, other: StructuredSpec | None = None) -> StructuredSpec | None:
        """The one thing that is asked for.

        Args:
            other: what a field of the API itself asks for.

        Raises:
            InvalidValueError: there are several.
        """
        given = [] if other is None else [other]
        if self.guided_json is not None:
            given.append(json_spec(self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            given.append(StructuredSpec("regex", self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            given.append(StructuredSpec("choice", json.dumps(self.guided_choice), "guided_choice"))
        if self.guided_grammar is not None:
            given.append(StructuredSpec("grammar", self.guided_grammar, "guided_grammar"))
        if self.structured_outputs is not None:
            given += self.structured_outputs.specs()
        if len(given) > 1:
            raise InvalidValueError(given[1].param, given[1].kind, f"absent beside {given[0].param}: one form only")
        return given[0] if given else None
