"""What handlers share: one frozen object at `request.app.state.ctx`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from starlette.requests import HTTPConnection

if TYPE_CHECKING:
    from app.settings import Settings
    from app.state import Console
    from app.templating import Templates
    from engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class AppContext:
    """The parts of a running application; built once by `app.factory`."""

    settings: Settings
    async_engine: AsyncEngine
    console: Console  # fold listeners, stream publishers, metrics, audit log
    templates: Templates


def context(connection: HTTPConnection) -> AppContext:
    """The context of the application that serves `connection`."""
    return cast("AppContext", connection.app.state.ctx)
