"""Tools that a client offers. The models here call none, which every choice but a forced one allows.

Chat front ends offer tools with each message; refusing those would leave them without an answer that the API permits.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from app.json_body import Body
from engine.errors import InvalidValueError

MAY_ANSWER = ("auto", "none")


class ToolChoice(Body):
    """The choice as an object: Anthropic's, and OpenAI's for one tool or for a list of allowed ones."""

    type: str
    mode: str | None = None
    allowed_tools: dict[str, Any] | None = None

    @property
    def is_forced(self) -> bool:
        """Whether an answer in words would break it."""
        if self.type == "allowed_tools":
            mode = self.mode if self.allowed_tools is None else self.allowed_tools.get("mode")
            return mode != "auto"
        return self.type not in MAY_ANSWER


class ToolFields(Body):
    """`tools`, and which of them the model must call."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None

    @model_validator(mode="after")
    def _refuse_forced_calls(self) -> ToolFields:
        refuse_forced("tool_choice", self.tool_choice)
        return self


class FunctionFields(Body):
    """The same in OpenAI's first form."""

    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_forced_functions(self) -> FunctionFields:
        refuse_forced("function_call", self.function_call)
        return self


def refuse_forced(field: str, choice: str | ToolChoice | dict[str, Any] | None) -> None:
    """Check a choice.

    Raises:
        InvalidValueError: a tool would have to be called.
    """
    if choice is None or (isinstance(choice, str) and choice in MAY_ANSWER):
        return
    if isinstance(choice, ToolChoice) and not choice.is_forced:
        return
    shown = choice if isinstance(choice, str) else "an object that forces a call"
    raise InvalidValueError(field, shown, "auto, none or absent: this server's models call no tools")
