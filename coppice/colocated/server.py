"""Server side of in-memory calls: methods as registered by generated code, one task per call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn

import grpc

from coppice.colocated.exchange import OK, Exchange, Metadata, PipeOverError, Status

logger = logging.getLogger(__name__)

STOPPED = Status(grpc.StatusCode.UNAVAILABLE, "the server has stopped")


class InMemoryServer:
    """Accepts servicers from `add_…Servicer_to_server`. Methods are unary or bidirectional streams, as ours are.

    gRPC's interceptors check bytes and tokens, which do not exist here.
    """

    def __init__(self) -> None:
        self._methods: dict[str, Any] = {}
        self._calls: dict[asyncio.Task[None], Exchange] = {}
        self._is_stopped = False

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignored: methods registered by name suffice."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve a service's methods."""
        self._methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    @property
    def num_calls(self) -> int:
        """Running calls."""
        return len(self._calls)

    def begin(self, method: str, exchange: Exchange) -> None:
        """Start a call; it ends at once if it cannot be served."""
        handler = self._methods.get(method)
        if self._is_stopped:
            exchange.finish(STOPPED)
        elif handler is None:
            exchange.finish(Status(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}"))
        else:
            task = asyncio.create_task(_serve(handler, exchange), name=method)
            self._calls[task] = exchange
            task.add_done_callback(self._calls.pop)
            exchange.on_abandoned = task.cancel

    def drop_calls(self) -> None:
        """End every call, like a lost connection; new calls are accepted."""
        for task, exchange in self._calls.items():
            exchange.finish(STOPPED)
            task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, let running ones finish for `grace_s` seconds, then cancel them."""
        self._is_stopped = True
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=grace_s)
        self.drop_calls()
        if self._calls:
            await asyncio.wait(set(self._calls))


class _Context:
    """The part of `grpc.aio.ServicerContext` that our servicers use."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Nothing: calls in one process have no headers."""

    async def write(self, message: Any) -> None:
        await self._exchange.responses.put(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self._exchange.finish(Status(code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError("locally aborted")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        metadata: Any = status.trailing_metadata or ()
        await self.abort(status.code, status.details or "", metadata)

    def invocation_metadata(self) -> Metadata:
        return self._exchange.metadata

    def time_remaining(self) -> float | None:
        return self._exchange.time_remaining_s


async def _serve(handler: Any, exchange: Exchange) -> None:
    """Run a method and set the call's status from its outcome."""
    context = _Context(exchange)
    try:
        if handler.request_streaming:
            await _stream(handler.stream_stream(_requests(exchange), context), context)
        else:
            request = await exchange.requests.get()
            await context.write(await handler.unary_unary(request, context))
    except (grpc.aio.AbortError, PipeOverError):
        pass  # the call has its status
    except asyncio.CancelledError:
        exchange.finish(STOPPED)
        raise
    except Exception as error:  # like gRPC: an error of a servicer only ends its call
        logger.exception("a servicer's method failed")
        exchange.finish(Status(grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}"))
    else:
        exchange.finish(OK)


async def _stream(answer: Any, context: _Context) -> None:
    """Run an answer: a coroutine that writes to the context, or a generator of messages."""
    if not hasattr(answer, "__aiter__"):
        await answer
        return
    async with contextlib.aclosing(answer):
        async for message in answer:
            await context.write(message)


async def _requests(exchange: Exchange) -> AsyncIterator[Any]:
    with contextlib.suppress(PipeOverError):
        while True:
            yield await exchange.requests.get()
