"""Bearer-token authentication of callers, before a call's message is read."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from coppice.core.errors import InvalidRequestError
from coppice.net.access_token import METADATA_KEY
from coppice.net.guard.pending import PEER_KEY
from orchestrator.api.tenants import Tenant
from orchestrator.api.token_file import TokenFile
from orchestrator.api.validation import TENANT_KEY, wanted_tenant

# One message for all failures, to leak nothing.
REFUSAL = "a valid bearer token is needed"

Metadata = Iterable[tuple[str, str | bytes]]
Handler = Any  # grpc.RpcMethodHandler, whose type parameters only exist for type checkers

# Tenant of the current call's token; None if no tokens are required.
_caller: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar("caller", default=None)


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses every call without a valid token, except health checks and, if `open_reflection`, reflection."""

    def __init__(self, tokens: TokenFile, *, open_reflection: bool) -> None:
        self.tokens = tokens
        names = [health.SERVICE_NAME, *([reflection.SERVICE_NAME] if open_reflection else [])]
        self._open = tuple(f"/{name}/" for name in names)
        self.num_refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's own handler, or one that refuses the call."""
        if not handler_call_details.method.startswith(self._open):
            token = bearer_token(handler_call_details.invocation_metadata)
            tenant = self.tokens.tenant(token) if token else None
            if tenant is None:
                self.num_refused += 1
                # Fits every method: a bidirectional stream need not read a message before it answers.
                return grpc.stream_stream_rpc_method_handler(_refuse)
            # gRPC runs each call in a task, and hence a context, of its own.
            _caller.set(tenant)
        return await continuation(handler_call_details)


def bearer_token(metadata: Metadata) -> str:
    """The bearer token of a call's metadata; empty unless there is exactly one."""
    values = [value for key, value in metadata if key == METADATA_KEY]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def calling_tenant(metadata: Metadata) -> Tenant:
    """Tenant of the call: the token's, or the named one if no tokens are required.

    Raises:
        InvalidRequestError: the metadata names another tenant than the token's, or too long a name.
    """
    named, tenant = wanted_tenant(metadata), _caller.get()
    if tenant is None:
        return Tenant(named)
    if named not in ("", tenant.name):
        raise InvalidRequestError(TENANT_KEY, "follows from the token here, and is not that")
    return tenant


def calling_peer(metadata: Metadata) -> str:
    """Address of the client's connection, "host:port"; empty without the guard that adds it."""
    return next((value for key, value in metadata if key == PEER_KEY and isinstance(value, str)), "")


async def _refuse(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
