"""The page at `/`: static files of this package, without anything from elsewhere."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATHS = {"/": "index.html", "/page/page.css": "page.css"} | {
    f"/page/{name}": name for name in ("main.js", "api.js", "chat.js", "compare.js", "live.js", "tree.js", "charts.js")
}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    # Own scripts, styles and calls alone; no frame around it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Of this version, or asked for again.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page; its files are read here, once."""
    return [_route(path, name) for path, name in PATHS.items()]


def _route(path: str, name: str) -> Route:
    content = (files("coppice.gateway") / "page" / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}
    kind = TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route(path, answer, methods=["GET"])
