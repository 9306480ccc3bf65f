"""The chat page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from app.context import context


async def chat_page(request: Request) -> Response:
    """GET /: the chat."""
    return context(request).templates.render(request, "playground/chat.html", "Chat", "chat")
