"""Authentication of callers by bearer tokens, before anything of a call's message is read."""

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

# The same for every reason: which of them it was is nobody's business.
REFUSAL = "a valid bearer token is needed"

Metadata = Iterable[tuple[str, str | bytes]]
Handler = Any  # grpc.RpcMethodHandler, whose type parameters exist for the type checker alone

# Whose token the current call has; None where no tokens are asked for.
_caller: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar("caller", default=None)


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses every call without a valid token, whatever it calls, except for health and, if it is open, reflection."""

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
        """The method's own handler, or one that refuses."""
        if not handler_call_details.method.startswith(self._open):
            token = bearer_token(handler_call_details.invocation_metadata)
            tenant = self.tokens.tenant(token) if token else None
            if tenant is None:
                self.num_refused += 1
                # It fits every method: one that streams both ways has to read nothing before it answers.
                return grpc.stream_stream_rpc_method_handler(_refuse)
            # Every call is a task of its own, and so has a context of its own.
            _caller.set(tenant)
        return await continuation(handler_call_details)


def bearer_token(metadata: Metadata) -> str:
    """The token of a call's metadata; empty where there is not exactly one."""
    values = [value for key, value in metadata if key == METADATA_KEY]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def calling_tenant(metadata: Metadata) -> Tenant:
    """Who calls: by its token, or where none are asked for, by what it says of itself.

    Raises:
        InvalidRequestError: it names another tenant than the one that its token is of, or one that is too long.
    """
    named, tenant = wanted_tenant(metadata), _caller.get()
    if tenant is None:
        return Tenant(named)
    if named not in ("", tenant.name):
        raise InvalidRequestError(TENANT_KEY, "follows from the token here, and is not that")
    return tenant


def calling_peer(metadata: Metadata) -> str:
    """The connection that a call came by, as "host:port"; empty where nothing in front of gRPC has said so."""
    return next((value for key, value in metadata if key == PEER_KEY and isinstance(value, str)), "")


async def _refuse(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
