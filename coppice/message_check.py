"""Messages that cannot be read: the caller's mistake, and told as such.

gRPC itself answers them with UNKNOWN and with the name of the class that could not be read. Messages of a stream are
read where they are iterated over, and are none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coppice.errors import InvalidRequestError

_UNREADABLE = object()
_MARK = "checks_message"

Method = TypeVar("Method", bound=Callable[..., Any])
Handler = Any  # grpc.RpcMethodHandler, whose type parameters exist for the type checker alone


def checks_message(method: Method) -> Method:
    """Mark a method that calls `check_message`, so that what cannot be read may be handed to it."""
    setattr(method, _MARK, True)
    return method


def check_message(request: Any) -> None:
    """Raise InvalidRequestError for what `MessageCheck` hands over in place of a message that cannot be read."""
    if request is _UNREADABLE:
        raise InvalidRequestError("request", "is not a message of this method")


class MessageCheck(grpc.aio.ServerInterceptor):
    """Hands methods that take one message something to refuse where it cannot be read."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's own handler, which reads with care."""
        handler: Any = await continuation(handler_call_details)
        # None for a method that does not exist.
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        streams = handler.response_streaming
        method = handler.unary_stream if streams else handler.unary_unary
        # Those of gRPC's own services know nothing of this. They are coroutines, those that stream too.
        if not hasattr(method, _MARK):
            method = functools.partial(_call_if_read, method)
        handling = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return handling(method, functools.partial(_read, handler.request_deserializer), handler.response_serializer)


def _read(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        return _UNREADABLE


async def _call_if_read(method: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
    if request is _UNREADABLE:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request: is not a message of this method")
    return await method(request, context)
