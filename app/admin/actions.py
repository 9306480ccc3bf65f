"""Every action of an admin passes here: it is in the audit log, done or refused, before it is answered."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from app.context import context
from app.errors import ApiError, error_of
from engine.errors import EngineError

T = TypeVar("T")


async def audited(request: Request, action: str, detail: str, command: Awaitable[T]) -> T:
    """The command's result.

    Raises:
        EngineError, ApiError: it was refused; the log says so.
    """
    ctx, outcome = context(request), "ok"
    try:
        return await command
    except (EngineError, ApiError) as error:
        outcome = f"refused ({error_of(error).status}): {error}"
        raise
    except Exception as error:
        outcome = f"failed: {type(error).__name__}"
        raise
    finally:
        key = request.state.key
        await ctx.console.audit.add(
            request.state.role.label,
            action,
            detail[:1000],
            outcome[:1000],
            ctx.async_engine.state.step,
            key_label="" if key is None else key.label,
        )
