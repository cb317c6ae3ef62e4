"""Bytes that are no message: the sender's mistake, which gRPC by itself would call an error of the server's."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coppice.errors import InvalidRequestError

Received = TypeVar("Received")
# Methods of others, as health and reflection, would not know what to do with a request that could not be read.
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
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        read = _or_raise if handler.request_streaming else _or_none
        return handler._replace(request_deserializer=functools.partial(read, handler.request_deserializer))


def check_request(request: object) -> None:
    """Raise InvalidRequestError for a request that could not be read."""
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


def _or_none(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        return None


def _or_raise(read: Callable[[bytes], Any], data: bytes) -> Any:
    message = _or_none(read, data)
    check_request(message)
    return message
