"""The orchestrator of a gateway: calls with the caller's own token, and the model that it serves.

Clients without a token have fair shares by connection, so each generates over the channel of its address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.gateway.errors import ApiError, from_rpc
from coppice.net.certificates import Certificates
from coppice.net.loop.call import LoopCall
from coppice.net.loop.channel import LoopChannel
from coppice.net.rpc import open_channel
from coppice.v1 import inference_pb2, inference_pb2_grpc

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
GENERATE = f"/{SERVICE_NAME}/Generate"
# Calls that only read what the orchestrator knows.
QUICK_TIMEOUT_S = 5.0
# How long the served model's name is taken as known: a restarted orchestrator may serve another.
KNOWN_S = 5.0
# Channels for generations; addresses that are next to each other have different ones.
NUM_CHANNELS = 16

Metadata = Sequence[tuple[str, str]]
Call = LoopCall[inference_pb2.GenerateResponse]
RoundsCall = grpc.aio.UnaryStreamCall[Any, inference_pb2.WatchRoundsResponse]


@dataclass(frozen=True)
class ServedModel:
    """The model that the orchestrator serves, under its name in HTTP."""

    name: str
    info: inference_pb2.GetModelInfoResponse

    def is_named(self, name: str) -> bool:
        """Whether a request names it, by its name here or its name in gRPC."""
        return name in (self.name, self.info.model)


class Upstream:
    """Calls of one orchestrator; close it."""

    def __init__(self, address: str, served_model_name: str = "", certificates: Certificates | None = None) -> None:
        self._served_model_name = served_model_name
        self._open = partial(LoopChannel, address, certificates)
        self._channel = open_channel(address, certificates=certificates)
        # Of generations, by their numbers.
        self._channels: dict[int, LoopChannel] = {}
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._known: ServedModel | None = None
        self._known_s = 0.0

    async def close(self) -> None:
        """Close the channels and cancel their calls."""
        await self._channel.close()
        for channel in self._channels.values():
            await channel.close()

    def generate(
        self, shared: bytes, prompt: bytes, metadata: Metadata, timeout_s: float, client: str, connection: str
    ) -> Call:
        """Begin a generation for a connection of a client, an IP address; the serialized request is in two parts."""
        number = _channel_number(client)
        channel = self._channels.get(number)
        if channel is None:
            channel = self._channels[number] = self._open()
        parse = inference_pb2.GenerateResponse.FromString
        return channel.call(GENERATE, prompt, parse, metadata, timeout_s, shared, client, connection)

    def watch_rounds(self, request_id: str, metadata: Metadata) -> RoundsCall:
        """Begin to watch rounds, of one request or of all that the caller may see."""
        request = inference_pb2.WatchRoundsRequest(request_id=request_id)
        call: RoundsCall = self._stub.WatchRounds(request, metadata=metadata)
        return call

    async def model(self, metadata: Metadata) -> ServedModel:
        """The served model, as the caller's token may see it.

        Raises:
            ApiError: the orchestrator refuses the caller, or is not there.
        """
        with _as_api_error():
            info: inference_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=QUICK_TIMEOUT_S, metadata=metadata
            )
        name = self._served_model_name or PurePosixPath(info.model).name or info.model
        self._known, self._known_s = ServedModel(name, info), time.monotonic()
        return self._known

    async def model_named(self, name: str | None, metadata: Metadata) -> ServedModel:
        """The served model, if a request means it; None means any. What is known of it is used again for a while.

        Raises:
            ApiError: another model is served, the orchestrator refuses the caller, or it is not there.
        """
        known, is_fresh = self._known, time.monotonic() - self._known_s < KNOWN_S
        if known is not None and is_fresh and (name is None or known.is_named(name)):
            return known
        model = await self.model(metadata)
        if name is not None and not model.is_named(name):
            text = f"the model {name[:200]!r} does not exist; {model.name!r} is served"
            raise ApiError(404, text, param="model", code="model_not_found")
        return model

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata, timeout_s: float
    ) -> inference_pb2.TokenizeResponse:
        """Tokens of a prompt or a conversation.

        Raises:
            ApiError: the orchestrator refuses it, or is not there.
        """
        with _as_api_error({"messages.tools": "tools"}.get):
            answer: inference_pb2.TokenizeResponse = await self._stub.Tokenize(
                request, timeout=timeout_s, metadata=metadata
            )
        return answer

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata, timeout_s: float
    ) -> inference_pb2.DetokenizeResponse:
        """Text of tokens.

        Raises:
            ApiError: the orchestrator refuses it, or is not there.
        """
        with _as_api_error({"token_ids": "tokens"}.get):
            answer: inference_pb2.DetokenizeResponse = await self._stub.Detokenize(
                request, timeout=timeout_s, metadata=metadata
            )
        return answer

    async def is_serving(self) -> bool:
        """Whether the orchestrator takes requests; health checks need no token."""
        try:
            answer = await self._health.Check(
                health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=QUICK_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@lru_cache(maxsize=4096)
def _channel_number(client: str) -> int:
    """Number of the channel for a client at this IP address."""
    try:
        return int(ipaddress.ip_address(client.partition("%")[0])) % NUM_CHANNELS
    except ValueError:
        return 0


@contextlib.contextmanager
def _as_api_error(rename: Callable[[str], str | None] = str) -> Iterator[None]:
    """Raise the orchestrator's errors as ApiError, with fields under the names that `rename` gives them in HTTP."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, rename) from error
