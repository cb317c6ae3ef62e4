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
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2

from coppice.gateway.errors import ApiError, from_rpc
from coppice.net.certificates import Certificates
from coppice.net.loop.call import LoopCall
from coppice.net.loop.channel import LoopChannel
from coppice.v1 import inference_pb2

Message = TypeVar("Message")

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
GENERATE, GET_MODEL_INFO, TOKENIZE, DETOKENIZE, WATCH_ROUNDS = (
    f"/{SERVICE_NAME}/{name}" for name in ("Generate", "GetModelInfo", "Tokenize", "Detokenize", "WatchRounds")
)
HEALTH = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"
# Calls that only read what the orchestrator knows.
QUICK_TIMEOUT_S = 5.0
# How long the served model's name is taken as known: a restarted orchestrator may serve another.
KNOWN_S = 5.0
# Channels for generations; addresses that are next to each other have different ones.
NUM_CHANNELS = 16

Metadata = Sequence[tuple[str, str]]
Call = LoopCall[inference_pb2.GenerateResponse]
RoundsCall = LoopCall[inference_pb2.WatchRoundsResponse]


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
        # Of calls with one answer, and of streams that last.
        self._quick, self._rounds = self._open(), self._open()
        # Of generations, by their numbers.
        self._channels: dict[int, LoopChannel] = {}
        self._known: ServedModel | None = None
        self._known_s = 0.0

    async def close(self) -> None:
        """Close the channels and cancel their calls."""
        for channel in (self._quick, self._rounds, *self._channels.values()):
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

    def watch_rounds(self, request_id: str, metadata: Metadata, client: str, connection: str) -> RoundsCall:
        """Begin to watch rounds, of one request or of all that the caller may see, for a connection of a client."""
        request = inference_pb2.WatchRoundsRequest(request_id=request_id).SerializeToString()
        parse = inference_pb2.WatchRoundsResponse.FromString
        return self._rounds.call(WATCH_ROUNDS, request, parse, metadata, client=client, connection=connection)

    async def model(self, metadata: Metadata) -> ServedModel:
        """The served model, as the caller's token may see it.

        Raises:
            ApiError: the orchestrator refuses the caller, or is not there.
        """
        with _as_api_error():
            request, parse = inference_pb2.GetModelInfoRequest(), inference_pb2.GetModelInfoResponse.FromString
            info = await self._answer(GET_MODEL_INFO, request.SerializeToString(), parse, metadata)
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
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata, timeout_s: float, client: str
    ) -> inference_pb2.TokenizeResponse:
        """Tokens of a prompt or a conversation.

        Raises:
            ApiError: the orchestrator refuses it, or is not there.
        """
        with _as_api_error({"messages.tools": "tools"}.get):
            parse = inference_pb2.TokenizeResponse.FromString
            return await self._answer(TOKENIZE, request.SerializeToString(), parse, metadata, timeout_s, client)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata, timeout_s: float, client: str
    ) -> inference_pb2.DetokenizeResponse:
        """Text of tokens.

        Raises:
            ApiError: the orchestrator refuses it, or is not there.
        """
        with _as_api_error({"token_ids": "tokens"}.get):
            parse = inference_pb2.DetokenizeResponse.FromString
            return await self._answer(DETOKENIZE, request.SerializeToString(), parse, metadata, timeout_s, client)

    async def is_serving(self) -> bool:
        """Whether the orchestrator takes requests; health checks need no token."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        try:
            answer = await self._answer(HEALTH, request.SerializeToString(), health_pb2.HealthCheckResponse.FromString)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _answer(
        self,
        path: str,
        request: bytes,
        parse: Callable[[bytes], Message],
        metadata: Metadata = (),
        timeout_s: float = QUICK_TIMEOUT_S,
        client: str = "",
    ) -> Message:
        """The one answer to a call for a client, or for the gateway itself.

        Raises:
            grpc.aio.AioRpcError: the call has failed.
        """
        call = self._asked().call(path, request, parse, metadata, timeout_s, client=client)
        answers: list[Message] = []
        try:
            async for answer in call:
                answers.append(answer)
                # More are no answer, and may have no end.
                if len(answers) > 1:
                    break
        finally:
            call.cancel()
        if len(answers) != 1:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "not one answer")
        return answers[0]

    def _asked(self) -> LoopChannel:
        """The channel of calls with one answer; while it has lost its connection, one of generations that has its own.

        Without DNS it could not connect again, and generations would be refused that can be sent.
        """
        others = (channel for channel in self._channels.values() if channel.is_connected)
        if self._quick.is_connected or (other := next(others, None)) is None:
            return self._quick
        self._quick.connect()
        return other


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
