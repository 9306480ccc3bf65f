"""The rows of the chat in the table of routes."""

from __future__ import annotations

from app.access import Role, RouteRow
from app.playground import api, pages

_CHAT = Role.INFERENCE

ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/", ("GET",), pages.chat_page, _CHAT, "chat_page"),
    RouteRow("/chat/api/generations", ("POST",), api.create, _CHAT, "create_generation"),
    RouteRow("/chat/api/generations/{generation_id}", ("GET",), api.read, _CHAT, "read_generation"),
    RouteRow("/chat/api/generations/{generation_id}", ("DELETE",), api.stop, _CHAT, "stop_generation"),
    RouteRow("/chat/api/stream", ("GET",), api.stream, _CHAT, "chat_stream"),
    RouteRow("/chat/api/tokenize", ("POST",), api.tokenize, _CHAT, "tokenize_chat"),
)
