"""Construction of the gateway: routes, and the running server; closed in reverse order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coppice.gateway.body_room import BodyRoom
from coppice.gateway.config import GatewayConfig
from coppice.gateway.counts import GatewayCounts
from coppice.gateway.endpoint import Endpoint, caller_metadata
from coppice.gateway.errors import ApiError
from coppice.gateway.generation import ChatCompletions, Completions
from coppice.gateway.http_server import serving
from coppice.gateway.page_files import page_routes
from coppice.gateway.rounds import RoundEvents
from coppice.gateway.tokens import Detokenize, Tokenize
from coppice.gateway.upstream import ServedModel, Upstream
from coppice.net.certificates import read_certificates
from coppice.net.rpc import is_loopback

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDPOINTS: dict[str, type[Endpoint]] = {
    "/v1/completions": Completions,
    "/v1/chat/completions": ChatCompletions,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}


@dataclass(frozen=True)
class Gateway:
    """A running gateway, at HOST:PORT."""

    address: str
    upstream: Upstream


@contextlib.asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Run a gateway while the context is open; closing drains it. The orchestrator may come later.

    Raises:
        UnavailableError: the address is taken or not local.
        ValueError: a certificate is invalid.
    """
    certificates = read_certificates(config.tls, "TLS_")
    to_orchestrator = read_certificates(config.orchestrator_tls, "ORCHESTRATOR_TLS_")
    if certificates is None and not is_loopback(config.listen_address):
        logger.warning("%s is served without TLS: prompts and tokens can be read on the way", config.listen_address)
    upstream = Upstream(config.orchestrator_address, config.served_model_name, to_orchestrator)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(upstream.close)
        counts = GatewayCounts()
        rounds = RoundEvents(upstream, config, counts)
        app = application(upstream, config, counts, rounds)
        address = await stack.enter_async_context(serving(app, config, certificates))
        stack.callback(rounds.close)
        yield Gateway(address, upstream)


def application(upstream: Upstream, config: GatewayConfig, counts: GatewayCounts, rounds: RoundEvents) -> ASGIApp:
    """The ASGI application."""
    models, bodies = Models(upstream), BodyRoom()
    endpoints = {path: kind(upstream, config, counts, bodies) for path, kind in ENDPOINTS.items()}
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route("/v1/coppice/rounds", rounds, methods=["GET"]),
        *page_routes(),
        Route("/v1/models", models.listed, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/ready", models.ready, methods=["GET"]),
    ]
    if config.metrics == "on":

        async def metrics(request: Request) -> Response:
            return Response(counts.page(), media_type=METRICS_TYPE)

        routes.append(Route("/metrics", metrics, methods=["GET"]))
    router = Starlette(routes=routes, exception_handlers={HTTPException: _refused, ApiError: _refused_by_orchestrator})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Straight to what is called most: the router's layers are part of the time to the first token.
        endpoint = endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        await (endpoint or router)(scope, receive, send)

    origins = list(config.allowed_origins)
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]) if origins else app


class Models:
    """The endpoints that say what is served."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def listed(self, request: Request) -> Response:
        """/v1/models."""
        model = await self._model(request)
        return JSONResponse({"object": "list", "data": [_card(model)]})

    async def one(self, request: Request) -> Response:
        """/v1/models/NAME."""
        model, name = await self._model(request), request.path_params["name"]
        if not model.is_named(name):
            raise ApiError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(_card(model))

    async def ready(self, request: Request) -> Response:
        """/ready: 200 if requests are served, else 503."""
        if await self._upstream.is_serving():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503)

    async def _model(self, request: Request) -> ServedModel:
        return await self._upstream.model(caller_metadata(request.headers))


def _card(model: ServedModel) -> dict[str, Any]:
    """A model as /v1/models has it; it has no date, so 0."""
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "coppice",
        "root": model.info.model,
        "max_model_len": model.info.max_context_tokens,
    }


async def _health(request: Request) -> Response:
    """/health: 200 as long as the process serves, whatever the orchestrator does."""
    return JSONResponse({"status": "ok"})


async def _refused(request: Request, error: Exception) -> Response:
    """Paths and methods that are not served, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path} is not served"
    body = ApiError(error.status_code, text, code="unknown_url").body()
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _refused_by_orchestrator(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
