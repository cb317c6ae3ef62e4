"""The serving end of calls in memory: methods as gRPC's generated code registers them, each call a task."""

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
    """Takes servicers from `add_…Servicer_to_server`. Methods are unary, or stream both ways: back ends have no others.

    Interceptors of a gRPC server look at bytes or at tokens, of which there are none here.
    """

    def __init__(self) -> None:
        self._methods: dict[str, Any] = {}
        self._calls: dict[asyncio.Task[None], Exchange] = {}
        self._is_stopped = False

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Nothing: what generated code registers by name is enough."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve a service's methods."""
        self._methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    @property
    def is_serving(self) -> bool:
        """Whether calls are taken."""
        return not self._is_stopped

    @property
    def num_calls(self) -> int:
        """Calls that last."""
        return len(self._calls)

    def begin(self, method: str, exchange: Exchange) -> None:
        """Take a call; it is over at once where it cannot be served."""
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
        """End every call, as a connection that is lost does; others are taken."""
        for task, exchange in self._calls.items():
            exchange.finish(STOPPED)
            task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those that last finish for `grace_s`, then cancel them."""
        self._is_stopped = True
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=grace_s)
        self.drop_calls()
        if self._calls:
            await asyncio.wait(set(self._calls))


class _Context:
    """What our servicers use of `grpc.aio.ServicerContext`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

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
    """Run a method to its end; whatever that is, it becomes the call's status."""
    context = _Context(exchange)
    try:
        if handler.request_streaming:
            await _stream(handler.stream_stream(_requests(exchange), context), context)
        else:
            request = await exchange.requests.get()
            await context.write(await handler.unary_unary(request, context))
    except (grpc.aio.AbortError, PipeOverError):
        pass  # it has ended, and has its status
    except asyncio.CancelledError:
        exchange.finish(STOPPED)
        raise
    except Exception as error:  # as gRPC has it: a bug of a servicer ends its call alone
        logger.exception("a servicer's method failed")
        exchange.finish(Status(grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}"))
    else:
        exchange.finish(OK)


async def _stream(answer: Any, context: _Context) -> None:
    """An answer is a coroutine that writes to the context, or a generator of messages."""
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
