"""What the API's description says of one route beside its row in the table of routes, and shapes that many share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

Json = dict[str, object]


class Answer(BaseModel):
    """Base of what the server answers with: what is not declared does not come."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(BaseModel):
    """What went wrong. Some errors carry more, such as the limits now in force."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the path or the query, or a header."""

    name: str
    where: Literal["path", "query", "header"]
    description: str
    schema: Mapping[str, object] = field(default_factory=lambda: {"type": "string"})
    required: bool = False
    example: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. `row` is the name of its row in the table of routes."""

    row: str
    tag: str
    summary: str
    description: str = ""
    body: tuple[type, ...] = ()  # the schemas of which one must fit
    body_schema: Mapping[str, object] | None = None  # where no model checks the body
    body_required: bool = True
    answer: type | None = None  # the JSON of a success
    answer_schema: Mapping[str, object] | None = None  # where no model describes it
    text: str = ""  # media type of a success that is no JSON
    is_endless: bool = False  # a stream without an end
    event: type | None = None  # of a stream: what the `data:` of an event holds
    is_closed_by_done: bool = True  # the last event of a stream is `[DONE]`
    error: type = ErrorAnswer
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    errors: Mapping[int, str] = field(default_factory=dict)  # beside those that come with any request
    failures: Mapping[int, str] = field(default_factory=dict)  # statuses >= 400 with the JSON of a success
    example: Mapping[str, object] | None = None  # of the body
    effect: Literal["", "changes", "ends"] = ""  # a Run on the page: changes the engine for all, or cannot be undone


def one_of(row: str, operations: tuple[Operation, ...]) -> Operation | None:
    """The operation of a row."""
    return next((operation for operation in operations if operation.row == row), None)
