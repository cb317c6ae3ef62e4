"""Unparsable messages: the sender's error, which gRPC would report as the server's."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coppice.core.errors import InvalidRequestError

Received = TypeVar("Received")
# Health and reflection do not handle it.
_OURS = "/coppice."


class UnreadablePeerError(Exception):
    """A peer sent an unparsable message."""


class UnreadableRequests(grpc.aio.ServerInterceptor):
    """Makes our methods answer INVALID_ARGUMENT: streams raise it on reading; unary methods get None as request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler's deserializer."""
        handler = await continuation(handler_call_details)
        # None for an unknown method.
        if handler is None:
            return handler
        is_ours = handler_call_details.method.startswith(_OURS)
        if handler.request_streaming:
            return _reading(handler, _or_raise) if is_ours else handler
        if is_ours:
            return _reading(handler, _or_none)
        # Both kinds are coroutines.
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        method = functools.partial(_call_if_read, getattr(handler, name))
        return _reading(handler, _or_none)._replace(**{name: method})


def check_request(request: object) -> None:
    """Raise InvalidRequestError for a request that was unparsable or refused by SizeChecks."""
    if isinstance(request, InvalidRequestError):
        raise request
    if request is None:
        raise InvalidRequestError("request", "is not a message of this method")


def received(message: Received | None) -> Received:
    """A peer's answer.

    Raises:
        UnreadablePeerError: the answer was unparsable.
    """
    if message is None:
        raise UnreadablePeerError
    return message


def _reading(handler: Any, read: Callable[..., Any]) -> Any:
    return handler._replace(request_deserializer=functools.partial(read, handler.request_deserializer))


async def _call_if_read(method: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
    if request is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request: is not a message of this method")
    return await method(request, context)


def _or_none(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        return None


def _or_raise(read: Callable[[bytes], Any], data: bytes) -> Any:
    message = _or_none(read, data)
    check_request(message)
    return message
