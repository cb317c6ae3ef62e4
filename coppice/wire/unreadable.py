"""Bytes that are no message: the sender's mistake, which gRPC by itself would call an error of the server's."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coppice.core.errors import InvalidRequestError

Received = TypeVar("Received")
# Methods of others, as health and reflection, know nothing of this.
_OURS = "/coppice."


class UnreadablePeerError(Exception):
    """A peer has sent something that is no message."""


class UnreadableRequests(grpc.aio.ServerInterceptor):
    """Lets our methods answer INVALID_ARGUMENT: a stream raises it where the message is; else the request is None."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Once per call, not per message."""
        handler = await continuation(handler_call_details)
        # None for a method that does not exist.
        if handler is None:
            return handler
        is_ours = handler_call_details.method.startswith(_OURS)
        if handler.request_streaming:
            return _reading(handler, _or_raise) if is_ours else handler
        if is_ours:
            return _reading(handler, _or_none)
        # They are coroutines, those that stream too.
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        method = functools.partial(_call_if_read, getattr(handler, name))
        return _reading(handler, _or_none)._replace(**{name: method})


def check_request(request: object) -> None:
    """Raise InvalidRequestError for a request that could not be read, or was refused before that (SizeChecks)."""
    if isinstance(request, InvalidRequestError):
        raise request
    if request is None:
        raise InvalidRequestError("request", "is no message of this method")


def received(message: Received | None) -> Received:
    """What a peer has answered.

    Raises:
        UnreadablePeerError: it could not be read.
    """
    if message is None:
        raise UnreadablePeerError
    return message


def _reading(handler: Any, read: Callable[..., Any]) -> Any:
    return handler._replace(request_deserializer=functools.partial(read, handler.request_deserializer))


async def _call_if_read(method: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
    if request is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request: is no message of this method")
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
