"""Templates and static files: the one place that knows where they lie, and how a page names them.

In a wheel they are packaged under `app/_web`; in a checkout they are the top-level `templates/` and `static/`.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from app.access import Role, RouteRow

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine

_PACKAGED = Path(__file__).parent / "_web"
WEB_ROOT = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent
TEMPLATES_DIR = WEB_ROOT / "templates"
STATIC_DIR = WEB_ROOT / "static"

# Front-end libraries: the name a page uses -> the file inside static/node_modules. Nothing else there is served.
VENDOR: dict[str, str] = {
    "htmx.js": "htmx.org/dist/htmx.min.js",
    "uplot.js": "uplot/dist/uPlot.iife.min.js",
    "uplot.mjs": "uplot/dist/uPlot.esm.js",
    "uplot.css": "uplot/dist/uPlot.min.css",
    "markdown-it.js": "markdown-it/dist/browser/markdown-it.umd.min.js",
    "markdown-it.mjs": "markdown-it/dist/browser/markdown-it.esm.min.mjs",
    "purify.js": "dompurify/dist/purify.min.js",
    "purify.mjs": "dompurify/dist/purify.es.mjs",
    "highlight.js": "@highlightjs/cdn-assets/highlight.min.js",
    "highlight.mjs": "@highlightjs/cdn-assets/es/highlight.min.js",
}

# What static/ holds for browsers; its package.json and lock file are none of their business.
_SERVED_SUFFIXES = frozenset({".css", ".js", ".mjs", ".svg", ".png", ".ico", ".woff2", ".webmanifest"})
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".webmanifest": "application/manifest+json"}
_IMMUTABLE = "public, max-age=31536000, immutable"  # the address holds the content's hash
_REVALIDATE = "no-cache"  # kept, but asked for again by ETag: modules import each other without a hash


@dataclass(frozen=True, slots=True)
class PageContext:
    """What every page gets as `page`."""

    title: str
    active: str  # which part of the navigation: "chat", "engine", "admin", "api" or ""
    role: str  # inference, read-only, admin; "" for a caller without one
    model_name: str
    version: str
    epoch: str  # of the engine: changes with each start
    root_path: str  # prefix of every address, "" or "/something"
    asset: Callable[[str], str]  # address of a file of static/, e.g. asset("css/base.css")


class Templates:
    """Renders pages. Everything is escaped; what is not defined is an error, not an empty string."""

    def __init__(self, async_engine: AsyncEngine, version: str, directory: Path = TEMPLATES_DIR) -> None:
        self._engine = async_engine
        self._version = version
        self.environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(directory),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def page(self, request: Request, title: str, active: str = "") -> PageContext:
        """The context of a page for this caller."""
        role: Role = getattr(request.state, "role", Role.OPEN)
        root_path = str(request.scope.get("root_path", ""))
        return PageContext(
            title=title,
            active=active,
            role="" if role is Role.OPEN else role.label,
            model_name=self._engine.info.name,
            version=self._version,
            epoch=self._engine.epoch,
            root_path=root_path,
            asset=lambda path: root_path + asset_path(path),
        )

    def render(
        self,
        request: Request,
        template: str,
        title: str,
        active: str = "",
        *,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        **values: object,
    ) -> HTMLResponse:
        """`template` with `page` and `values`; a page shows a state, so no cache keeps it."""
        html = self.environment.get_template(template).render(page=self.page(request, title, active), **values)
        return HTMLResponse(html, status_code=status_code, headers={"cache-control": "no-store", **(headers or {})})

    def login_page(
        self,
        request: Request,
        *,
        next_path: str,
        status: int = 200,
        error: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTMLResponse:
        """The form that takes a key; `next_path` is where it leads to."""
        return self.render(
            request, "admin/login.html", "Log in", status_code=status, headers=headers, next_path=next_path, error=error
        )

    def error_page(
        self, request: Request, status: int, title: str, message: str, headers: Mapping[str, str] | None = None
    ) -> HTMLResponse:
        """The one page for errors."""
        return self.render(
            request, "errors/error.html", title, status_code=status, headers=headers, status=status, message=message
        )


def static_file(path: str) -> Path | None:
    """The file that `/static/<path>` serves, or None. `vendor/<name>` goes through the allow-list."""
    if path.startswith("vendor/"):
        target = VENDOR.get(path.removeprefix("vendor/"))
        return STATIC_DIR / "node_modules" / target if target is not None else None
    parts = path.split("/")
    is_hidden = any(part in ("", "node_modules") or part.startswith(".") for part in parts)
    if is_hidden or "\0" in path or "\\" in path or Path(path).suffix not in _SERVED_SUFFIXES:
        return None
    return STATIC_DIR / path


@lru_cache(maxsize=512)
def _content_hash(file: Path, mtime_ns: int) -> str:
    del mtime_ns  # part of the key only: an edited file gets a new hash
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def asset_path(path: str) -> str:
    """`/static/<path>?v=<hash of the content>`; without a hash for a file that is not there (the page says so then)."""
    file = static_file(path)
    try:
        return f"/static/{path}?v={_content_hash(file, file.stat().st_mtime_ns)}" if file else f"/static/{path}"
    except OSError:
        return f"/static/{path}"


_STATIC_FILES = StaticFiles(directory=STATIC_DIR, check_dir=False)


async def serve_static(request: Request) -> Response:
    """GET /static/...: a file of `static/`, or a library on the allow-list."""
    file = static_file(request.path_params["path"])
    if file is None:
        raise HTTPException(404)
    response = await _STATIC_FILES.get_response(str(file.relative_to(STATIC_DIR)), request.scope)
    if isinstance(response, FileResponse | NotModifiedResponse):
        kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        response.headers["content-type"] = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        response.headers["cache-control"] = _IMMUTABLE if request.query_params.get("v") else _REVALIDATE
    return response


async def favicon(request: Request) -> Response:
    """GET /favicon.ico, which browsers ask for unasked."""
    request.path_params["path"] = "icon.svg"
    return await serve_static(request)


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/static/{path:path}", ("GET",), serve_static, Role.OPEN, "static"),
    RouteRow("/favicon.ico", ("GET",), favicon, Role.OPEN, "favicon"),
)
