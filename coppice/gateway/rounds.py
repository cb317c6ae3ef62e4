"""`/v1/coppice/rounds`: rounds and load as events, from the orchestrator's `WatchRounds`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coppice.gateway.choices import token_text
from coppice.gateway.config import GatewayConfig
from coppice.gateway.counts import GatewayCounts
from coppice.gateway.endpoint import caller_metadata
from coppice.gateway.errors import SERVER, ApiError, broken_answer, from_rpc
from coppice.gateway.exchange import ClientGoneError, HttpExchange
from coppice.gateway.upstream import Upstream
from coppice.v1 import inference_pb2, tree_pb2

_STATES = {
    inference_pb2.NODE_STATE_ACCEPTED: "accepted",
    inference_pb2.NODE_STATE_REJECTED: "rejected",
    inference_pb2.NODE_STATE_PRUNED: "pruned",
}
_ORIGINS = {
    tree_pb2.DRAFT_ORIGIN_FRESH: "fresh",
    tree_pb2.DRAFT_ORIGIN_LEFT_OVER: "left over",
    tree_pb2.DRAFT_ORIGIN_REROOTED: "re-rooted",
    tree_pb2.DRAFT_ORIGIN_AHEAD: "ahead",
    tree_pb2.DRAFT_ORIGIN_REDRAFT: "verifier",
}


class RoundEvents:
    """The endpoint, as an ASGI application. Its streams end with `close`: they last as long as their clients."""

    def __init__(self, upstream: Upstream, config: GatewayConfig, counts: GatewayCounts) -> None:
        self._upstream = upstream
        self._config = config
        self._counts = counts
        self._enders: set[Callable[[], object]] = set()
        self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; errors in OpenAI's shape."""
        exchange = HttpExchange(scope, receive, send)
        with self._counts.request(scope["path"], exchange):
            try:
                await self._stream(exchange, Request(scope).query_params.get("request_id", ""))
            except ApiError as error:
                await exchange.refuse(error)
            except ClientGoneError:
                pass
            except asyncio.CancelledError:
                await exchange.refuse(_stopping())

    def close(self) -> None:
        """End all streams, and refuse new ones."""
        self._is_closed = True
        for end in self._enders:
            end()

    async def _stream(self, exchange: HttpExchange, request_id: str) -> None:
        if self._is_closed:
            raise _stopping()
        caller = exchange.client, exchange.connection
        call = self._upstream.watch_rounds(request_id, caller_metadata(exchange.headers), *caller)
        self._enders.add(call.cancel)
        try:
            async with exchange.watched(call.cancel), exchange.kept_alive(self._config.keep_alive_s):
                async for message in call:
                    # A newer orchestrator may have other events.
                    if message.WhichOneof("event") is not None:
                        await exchange.event(event_fields(message))
                await exchange.end()
        except grpc.aio.AioRpcError as error:
            raise _refusal(error) from error
        except asyncio.CancelledError:
            # The call's cancellation, by `close`; or the task's own, at the end of the process's grace.
            raise _stopping() from None
        finally:
            self._enders.discard(call.cancel)
            call.cancel()


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", SERVER, code="unavailable")


def _refusal(error: grpc.aio.AioRpcError) -> ApiError:
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return ApiError(404, "rounds cannot be watched here: the orchestrator has no WATCH_ROUNDS", code="not_enabled")
    return from_rpc(error, str)


def event_fields(message: inference_pb2.WatchRoundsResponse) -> dict[str, Any]:
    """An event: `object` says which.

    Raises:
        ApiError: a round's parts do not fit together.
    """
    try:
        fields = _round(message.round) if message.HasField("round") else _load(message.load)
    except (ValueError, OverflowError) as error:
        raise broken_answer("the parts of a round do not fit together") from error
    return {**fields, "missed_rounds": message.missed_rounds}


def _round(one: inference_pb2.RoundReport) -> dict[str, Any]:
    tree = one.tree
    masks = tree.sources or [2 ** len(tree.source_names) - 1] * len(tree.token_ids)
    nodes = [
        {
            "id": token,
            "text": token_text(text),
            "parent": parent,
            "probability": math.exp(log_prob),
            "sources": [name for bit, name in enumerate(tree.source_names) if mask >> bit & 1],
            "state": _STATES.get(state, "rejected"),
        }
        for token, text, parent, log_prob, mask, state in zip(
            tree.token_ids, one.node_tokens, tree.parents, tree.log_probs, masks, one.node_states, strict=True
        )
    ]
    tokens = zip(one.token_ids, one.tokens, strict=True)
    return {
        "object": "coppice.round",
        "request_id": one.request_id,
        "output": one.output_index,
        "time": one.time_s,
        "base_length": one.base_length,
        "tokens": [{"id": token, "text": token_text(text)} for token, text in tokens],
        "nodes": nodes,
        "origin": _ORIGINS.get(one.origin),
        "budget": one.budget,
        "row_price": one.row_price,
        "pass_rows": one.pass_rows,
        "pass_ms": one.pass_us / 1000,
        "linger_ms": one.linger_us / 1000,
        "round_ms": one.round_us / 1000 if one.round_us else None,
    }


def _load(one: inference_pb2.LoadReport) -> dict[str, Any]:
    return {
        "object": "coppice.load",
        "time": one.time_s,
        "running": one.running,
        "waiting": one.waiting,
        "planned_nodes": one.planned_nodes,
        "drafting": one.drafting,
        "generated_tokens": one.generated_tokens,
        "rounds": one.rounds,
        "draft_tokens": one.draft_tokens,
        "accepted_tokens": one.accepted_tokens,
        "verifiers": [
            {
                "batch_size": verifier.batch_size,
                "rows": verifier.rows,
                "pass_ms": verifier.pass_us / 1000,
                "queued": verifier.queued_sequences,
                "free_kv_blocks": verifier.free_kv_blocks,
                "row_price": verifier.row_price,
            }
            for verifier in one.verifiers
        ],
    }
