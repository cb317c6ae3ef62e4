"""An endpoint that takes a JSON object: its body, its caller, its deadline and its errors."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from coppice.gateway.body_room import BodyRoom
from coppice.gateway.config import GatewayConfig
from coppice.gateway.counts import GatewayCounts
from coppice.gateway.errors import SERVER, ApiError, invalid
from coppice.gateway.exchange import ClientGoneError, HttpExchange
from coppice.gateway.fields import parse
from coppice.gateway.upstream import Metadata, Upstream
from coppice.net.access_token import METADATA_KEY
from coppice.obs.logs import MAX_REQUEST_ID_BYTES, request_id

logger = logging.getLogger(__name__)

TENANT_KEY = "x-tenant-id"
REQUEST_ID = "x-request-id"
REQUEST_TIMEOUT = "x-request-timeout"
# For a body to arrive, once there is room for it.
BODY_S = 10.0
_MIB = 1024 * 1024


class Endpoint(ABC):
    """An endpoint that takes a JSON object, as an ASGI application; subclasses answer its fields."""

    kind: ClassVar[type[BaseModel]]

    def __init__(self, upstream: Upstream, config: GatewayConfig, counts: GatewayCounts, bodies: BodyRoom) -> None:
        self._upstream = upstream
        self._config = config
        self._counts = counts
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; errors in OpenAI's shape."""
        exchange = HttpExchange(scope, receive, send)
        with self._counts.request(scope["path"], exchange):
            await self._answer(exchange)

    async def _answer(self, exchange: HttpExchange) -> None:
        # No secret: the system's own randomness would cost a call.
        identity = f"{random.getrandbits(128):032x}"
        try:
            identity = _identity(exchange) or identity
            request_id.set(identity)
            exchange.headers_sent[REQUEST_ID] = identity
            await self.respond(exchange, await self._fields(exchange), identity)
        except ApiError as error:
            await exchange.refuse(error)
        except ClientGoneError:
            logger.debug("the client has left")
        except asyncio.CancelledError:
            # Only at the end of the process's grace; the task ends with this answer.
            await exchange.refuse(ApiError(503, "the server is stopping", SERVER, code="unavailable"))
        except MemoryError:
            logger.error("no memory for a request")
            await exchange.refuse(ApiError(503, "no memory for the request now", SERVER, code="unavailable"))
        except Exception:
            # Its text may have what is private; the id finds it in the log.
            logger.exception("unexpected error")
            await exchange.refuse(ApiError(500, f"internal error, request {identity}", SERVER))

    async def _fields(self, exchange: HttpExchange) -> Any:
        """The fields of the body, read when there is room for it.

        Raises:
            ApiError: they are refused.
            ClientGoneError: the client has left.
        """
        max_bytes = self._config.max_body_mib * _MIB
        async with self._bodies.hold(exchange.body_bytes(max_bytes), exchange.client):
            try:
                async with asyncio.timeout(BODY_S):
                    body = await exchange.body(max_bytes)
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_S:g} s", code="request_timeout") from None
            return parse(body, self.kind)

    @abstractmethod
    async def respond(self, exchange: HttpExchange, fields: Any, identity: str) -> None:
        """Answer valid fields.

        Raises:
            ApiError: they are refused.
            ClientGoneError: the client has left.
        """

    def timeout_s(self, exchange: HttpExchange) -> float:
        """Seconds that a request may take: what it asks for, at most what is configured.

        Raises:
            ApiError: it asks for what is no number above 0.
        """
        text = exchange.headers.get(REQUEST_TIMEOUT)
        if text is None:
            return self._config.request_timeout_s
        try:
            wanted_s = float(text)
        except ValueError:
            wanted_s = 0.0
        if not wanted_s > 0:
            raise invalid(REQUEST_TIMEOUT, "must be a number of seconds above 0")
        return min(wanted_s, self._config.request_timeout_s)


def caller_metadata(headers: Headers, user: str | None = None) -> Metadata:
    """Metadata of the caller's calls: its token as it is; without one, `user` is the tenant.

    Raises:
        ApiError: a header or the user cannot be sent on.
    """
    tokens = headers.getlist(METADATA_KEY)
    if tokens:
        if len(tokens) > 1 or not _is_printable(tokens[0]):
            raise ApiError(401, "a valid bearer token is needed", "authentication_error", code="invalid_api_key")
        return ((METADATA_KEY, tokens[0]),)
    if not user:
        return ()
    if not _is_printable(user):
        raise invalid("user", "must be printable ASCII")
    return ((TENANT_KEY, user),)


def _identity(exchange: HttpExchange) -> str:
    """Id that the client has chosen for its request; empty if it has none.

    Raises:
        ApiError: it is too long, or cannot be a header.
    """
    identity = exchange.headers.get(REQUEST_ID, "")
    if len(identity) > MAX_REQUEST_ID_BYTES or not _is_printable(identity):
        raise invalid(REQUEST_ID, f"must be at most {MAX_REQUEST_ID_BYTES} characters of printable ASCII")
    return identity


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
