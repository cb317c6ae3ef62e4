"""Requests of a benchmark over HTTP: streams of the gateway's /v1/completions, token ids in and out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import httptools

from coppice.client import Chunk, RequestFailedError
from coppice.completion import Completion, SourceCounts, Speculation, Timing, Usage
from coppice.v1 import inference_pb2

READ_BYTES = 65_536
REFUSED_STATUS, REFUSED_CODE = 429, "rate_limit_exceeded"
_Mode = inference_pb2.SpeculationPolicy.Mode


class GatewayClient:
    """Client of one gateway, HOST:PORT, for the model of this name; every request has a connection of its own."""

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model

    def stream_request(self, request: inference_pb2.GenerateRequest, timeout_s: float) -> GatewayStream:
        """Send a request of the contract for one output, as far as benchmarks use it."""
        sampling, stopping, policy = request.sampling, request.stopping, request.speculation
        speculation: dict[str, Any] = {"mode": _Mode.Name(policy.mode).removeprefix("MODE_").lower()}
        if policy.HasField("max_nodes"):
            speculation["max_nodes"] = policy.max_nodes
        if policy.sources:
            speculation["sources"] = list(policy.sources)
        fields = {
            "model": self._model,
            "prompt": list(request.token_ids.ids),
            "max_tokens": stopping.max_tokens,
            "ignore_eos": stopping.ignore_eos,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "repetition_penalty": sampling.repetition_penalty,
            "cache_salt": request.cache_salt,
            "speculation": speculation,
            "stream": True,
            "return_token_ids": True,
        }
        return GatewayStream(self._address, json.dumps(fields).encode(), timeout_s)


class GatewayStream:
    """Chunks of a request in order, as those of gRPC's `Stream`."""

    def __init__(self, address: str, body: bytes, timeout_s: float) -> None:
        self._address = address
        self._body = body
        self._timeout_s = timeout_s
        self._writer: asyncio.StreamWriter | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._completion: Completion | None = None

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Raises RequestFailedError if the gateway refused or failed the request, or ended its answer too early."""
        answer = _Answer()
        try:
            reader = await self._sent()
            deadline_s = asyncio.get_running_loop().time() + self._timeout_s
            while not answer.is_whole:
                # The time of whoever reads the chunks does not count.
                async with asyncio.timeout_at(deadline_s):
                    data = await reader.read(READ_BYTES)
                if not data:
                    raise failed("the connection ended before the answer did")
                for event in answer.feed(data):
                    if (chunk := self._read(event)) is not None:
                        yield chunk
        except TimeoutError as error:
            raise failed(f"no answer within {self._timeout_s:g} s") from error
        except (OSError, httptools.HttpParserError) as error:
            raise failed(f"{type(error).__name__}: {error}") from error
        finally:
            self.cancel()
        if self._completion is None:
            raise failed("the stream has no end")

    async def _sent(self) -> asyncio.StreamReader:
        host, _, port = self._address.rpartition(":")
        reader, self._writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self._body)}\r\n"
            f"X-Request-Timeout: {self._timeout_s:g}\r\n\r\n"
        )
        self._writer.write(head.encode() + self._body)
        return reader

    def cancel(self) -> None:
        """Close the connection; the gateway cancels a request that has not ended."""
        if self._writer is not None:
            self._writer.close()

    def result(self) -> Completion:
        """The completion, after the last chunk. Raises RuntimeError if the output has not ended."""
        if self._completion is None:
            raise RuntimeError("the stream has not ended")
        return self._completion

    def _read(self, event: Mapping[str, Any]) -> Chunk | None:
        for choice in event["choices"]:
            token_ids = choice["token_ids"]
            self._token_ids += token_ids
            self._text.append(choice["text"])
            if choice["finish_reason"] is not None:
                self._completion = self._finished(event["id"], choice)
            if choice["text"] or token_ids:
                return Chunk(choice["text"], tuple(token_ids))
        return None

    def _finished(self, request_id: str, choice: Mapping[str, Any]) -> Completion:
        counts = choice["coppice"]
        return Completion(
            request_id=request_id,
            seed=counts["seed"],
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=choice["finish_reason"],
            stop_match=choice["stop_reason"],
            usage=Usage(completion_tokens=len(self._token_ids)),
            speculation=Speculation(
                rounds=counts["rounds"],
                draft_tokens=counts["draft_tokens"],
                accepted_tokens=counts["accepted_tokens"],
                mean_acceptance_length=counts["mean_acceptance_length"],
                sources={name: SourceCounts(**one) for name, one in counts["sources"].items()},
                near_ties=counts["near_ties"],
            ),
            timing=Timing(queue_ms=counts["queue_ms"], ttft_ms=counts["ttft_ms"], total_ms=counts["total_ms"]),
        )


class _Answer:
    """An HTTP answer as it comes: the events of its body, or its error. httptools calls what begins with `on_`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._retry_after_ms = b""
        self._body = b""
        self.is_whole = False

    def feed(self, data: bytes) -> list[Mapping[str, Any]]:
        """The events that bytes complete. Raises RequestFailedError for an error, or HttpParserError."""
        self._parser.feed_data(data)
        if (status := self._parser.get_status_code()) != 200:
            if not self.is_whole:
                return []
            told = json.loads(self._body)["error"]
            raise failed(told["message"], status == REFUSED_STATUS, self._retry_after_ms)
        *whole, self._body = self._body.split(b"\n\n")
        events = [json.loads(event[6:]) for event in whole if event.startswith(b"data: {")]
        for event in events:
            if told := event.get("error"):
                raise failed(told["message"], told["code"] == REFUSED_CODE)
        return events

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after-ms":
            self._retry_after_ms = value

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        self.is_whole = True


def failed(message: str, is_refused: bool = False, retry_after_ms: bytes = b"") -> RequestFailedError:
    """The error of gRPC's client for an answer over HTTP."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_refused else grpc.StatusCode.UNKNOWN
    error = RequestFailedError(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message))
    error.retry_after_s = int(retry_after_ms) / 1000 if retry_after_ms else None
    return error
