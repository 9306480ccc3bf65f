"""Errors of the engine, typed so that each caller can tell whose fault it was.

EngineError
├── RequestError                 costs one request, the engine goes on
│   ├── InvalidValueError        a field's value is outside its range (HTTP 400, `param` = the field)
│   ├── RequestTooLongError      can never fit max_model_len or the usable pool (HTTP 400)
│   ├── QueueFullError           the waiting queue is at its bound (HTTP 503 with Retry-After)
│   └── EngineDrainingError      shutting down, no new work (HTTP 503)
├── EngineDeadError              a step failed; every request fails until a restart (HTTP 503)
├── NotPausedError               single steps were asked for while the engine runs freely (HTTP 409)
├── LimitsError                  a staged limit is out of range (HTTP 422)
├── StaleLimitsError             the limits changed since they were read (HTTP 412)
└── StartupError                 the engine cannot start as configured; the message says what would work
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything this engine raises on purpose."""


class RequestError(EngineError):
    """A request that is refused; `param` names the offending field if there is one."""

    param: str | None = None


class InvalidValueError(RequestError):
    """`param` = `value` is not allowed; `limit` says in words what is."""

    def __init__(self, param: str, value: object, limit: str) -> None:
        super().__init__(f"{param} must be {limit}, got {value!r}")
        self.param = param
        self.value = value
        self.limit = limit


class RequestTooLongError(RequestError):
    """The request can never fit; the message carries the numbers."""

    def __init__(self, message: str, param: str = "prompt") -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RequestError):
    """`max_num_queued_reqs` requests already wait."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        super().__init__(f"the waiting queue is full: {num_waiting} requests wait, max_num_queued_reqs is {limit}")
        self.num_waiting = num_waiting
        self.limit = limit


class EngineDrainingError(RequestError):
    """The engine takes no new work because it is shutting down or was told to drain."""


class EngineDeadError(EngineError):
    """The engine's step loop failed; the message carries the cause."""


class NotPausedError(EngineError):
    """Single steps need a paused engine."""


class LimitsError(EngineError):
    """A limit outside its range; nothing was applied."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}, got {value!r}")
        self.field = field
        self.value = value
        self.allowed = allowed


class StaleLimitsError(EngineError):
    """The limits are at another version than the caller read."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(f"the limits are at version {current}, not {expected}")
        self.expected = expected
        self.current = current


class StartupError(EngineError):
    """The engine cannot start with this configuration."""
