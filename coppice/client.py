"""Client of the public API: completions and model information; errors carry the field and retry delay.

async with Client("127.0.0.1:50050") as client:
    completion = await client.generate("def add(a, b):", Options(max_tokens=32))

With TLS: Client("127.0.0.1:50050", tls=ChannelTls(ca="ca.pem")).
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from coppice.completion import Completion, CompletionBuilder
from coppice.core.errors import CoppiceError
from coppice.core.log_probs import TokenLogProbs
from coppice.net.access_token import bearer_metadata
from coppice.net.certificates import Certificates
from coppice.net.rpc import open_channel
from coppice.net.tls import ChannelTls
from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from coppice.wire.convert import log_probs_from_proto

DEFAULT_TIMEOUT_S = 600.0
ACCEPTANCE = {
    "sample-and-follow": sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW,
    "traversal": sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL,
}
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class Options:
    """Options of a completion; None leaves a field to the server. Meanings as in `sampling.proto`.

    Raises:
        ValueError: two fields exclude each other, or the acceptance rule is unknown.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool | None = None
    # "auto", "off", or names of the drafters to use, separated by commas.
    speculation: str = "auto"
    # Most draft nodes of a round.
    max_nodes: int | None = None
    # Acceptance rule, one of ACCEPTANCE. At temperatures above 0 traversal keeps the distribution of outputs, but not
    # the tokens of a seed.
    acceptance: str | None = None
    # For drafters of kind "diffusion": denoising passes per block, and tokens per block.
    denoising_steps: int | None = None
    block_tokens: int | None = None
    # Prompts share cached prefixes among requests with the same salt.
    cache_salt: str = ""
    # Tokens already delivered by an interrupted call.
    resume_token_ids: tuple[int, ...] = ()
    # Log-probabilities of generated tokens and of this many likeliest tokens; None: none.
    top_log_probs: int | None = None
    # Number of concurrent outputs for the prompt.
    num_outputs: int | None = None
    # Format of the output: a JSON schema (text or object) or a regular expression, not both.
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex exclude each other")
        if self.acceptance is not None and self.acceptance not in ACCEPTANCE:
            raise ValueError(f"acceptance must be one of {', '.join(ACCEPTANCE)}, got {self.acceptance!r}")


@dataclass(frozen=True)
class Chunk:
    """New text and tokens of an output since its last chunk."""

    text: str
    token_ids: tuple[int, ...]
    # One per token, if requested.
    log_probs: tuple[TokenLogProbs, ...] = ()
    # Index of its output.
    output_index: int = 0


class RequestFailedError(CoppiceError):
    """The server refused or failed a request."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(f"{error.code().name}: {error.details()}")
        self.code: grpc.StatusCode = error.code()
        self.details = error.details() or ""
        # Wrong fields, for INVALID_ARGUMENT.
        self.fields: tuple[str, ...] = ()
        # Delay until a retry, for RESOURCE_EXHAUSTED.
        self.retry_after_s: float | None = None
        for detail in _details(error):
            if isinstance(detail, error_details_pb2.BadRequest):
                self.fields = tuple(violation.field for violation in detail.field_violations)
            elif isinstance(detail, error_details_pb2.RetryInfo):
                self.retry_after_s = max(0, detail.retry_delay.ToMilliseconds()) / 1000


class Stream:
    """Chunks of a request in order; those of several outputs are interleaved as they come."""

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse], num_outputs: int = 1
    ) -> None:
        self._call = call
        self._num_outputs = num_outputs
        self._outputs: defaultdict[int, CompletionBuilder] = defaultdict(CompletionBuilder)

    def cancel(self) -> None:
        """Cancel the request; the server frees its resources."""
        self._call.cancel()

    def result(self) -> Completion:
        """Completion of a request for one output, after the last chunk.

        Raises:
            RuntimeError: the output has not ended, or there are several (see `results`).
        """
        if self._num_outputs != 1:
            raise RuntimeError(f"the request has {self._num_outputs} outputs, not one")
        return self.results()[0]

    def results(self) -> tuple[Completion, ...]:
        """Completions of all outputs, in order, after the last chunk.

        Raises:
            RuntimeError: an output has not ended.
        """
        completions = [self._outputs[index].completion for index in sorted(self._outputs)]
        ended = tuple(completion for completion in completions if completion is not None)
        if len(ended) != self._num_outputs:
            raise RuntimeError(f"the stream has {len(ended)} finished outputs, not {self._num_outputs}")
        return ended

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for message in self._call:
                self._outputs[message.output_index].add(message)
                if message.text or message.token_ids or message.log_probs:
                    yield Chunk(
                        text=message.text,
                        token_ids=tuple(message.token_ids),
                        log_probs=log_probs_from_proto(message.log_probs),
                        output_index=message.output_index,
                    )
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(error) from error
        finally:
            # No effect on a finished call; cancels one that is abandoned early.
            self._call.cancel()


class Client:
    """Client of one orchestrator over one channel; close it, or use it as an async context manager.

    `tenant` is the name for fair sharing; where the server requires tokens, the token determines it. The files of `tls`
    are read once; None: plaintext.

    Raises:
        TlsError: a file of `tls` is invalid.
    """

    def __init__(self, address: str, tenant: str = "", token: str = "", tls: ChannelTls | None = None) -> None:
        self.address = address
        self._metadata = ((("x-tenant-id", tenant),) if tenant else ()) + bearer_metadata(token)
        self._channel = open_channel(address, certificates=None if tls is None else Certificates(tls))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel and cancel its calls."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Completion:
        """Complete a prompt (text or token ids). For several outputs see `generate_all`.

        Raises:
            RequestFailedError: the server refused or failed it.
        """
        return await self.send(build_request(prompt, options), timeout_s)

    async def generate_all(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[Completion, ...]:
        """Complete a prompt with `options.num_outputs` outputs, in order.

        Raises:
            RequestFailedError: the server refused or failed it.
        """
        stream = self.stream(prompt, options, timeout_s)
        async for _ in stream:
            pass
        return stream.results()

    async def send(self, request: inference_pb2.GenerateRequest, timeout_s: float = DEFAULT_TIMEOUT_S) -> Completion:
        """Send any request for one output.

        Raises:
            RequestFailedError: the server refused or failed it.
        """
        stream = self.stream_request(request, timeout_s)
        async for _ in stream:
            pass
        return stream.result()

    def stream(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Stream:
        """Complete a prompt in chunks; iteration raises RequestFailedError on failure."""
        return self.stream_request(build_request(prompt, options), timeout_s)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Completion:
        """Answer a conversation: messages with `role` and `content`, oldest first.

        Raises:
            RequestFailedError: the server refused or failed it; UNIMPLEMENTED if the target has no chat template.
        """
        return await self.send(build_chat_request(messages, options), timeout_s)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Stream:
        """Answer a conversation in chunks; iteration raises RequestFailedError on failure."""
        return self.stream_request(build_chat_request(messages, options), timeout_s)

    def stream_request(self, request: inference_pb2.GenerateRequest, timeout_s: float = DEFAULT_TIMEOUT_S) -> Stream:
        """Like `stream`, for any request."""
        num_outputs = request.num_outputs if request.HasField("num_outputs") else 1
        return Stream(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata), num_outputs)

    async def watch_rounds(self, request_id: str = "") -> AsyncIterator[inference_pb2.WatchRoundsResponse]:
        """Rounds as they end, of one request or of all that the caller may see, and the load; the server ends it.

        Raises:
            RequestFailedError: the server refused or failed it; UNIMPLEMENTED if rounds cannot be watched.
        """
        call = self._stub.WatchRounds(inference_pb2.WatchRoundsRequest(request_id=request_id), metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(error) from error
        finally:
            call.cancel()

    async def model_info(self, timeout_s: float = 30.0) -> inference_pb2.GetModelInfoResponse:
        """Model, limits and features of the server.

        Raises:
            RequestFailedError: the server refused or failed it.
        """
        try:
            info: inference_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(error) from error
        return info


def build_request(prompt: str | Sequence[int], options: Options | None = None) -> inference_pb2.GenerateRequest:
    """Request for a prompt, given as text or token ids."""
    request = _without_input(options or Options())
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def build_chat_request(
    messages: Sequence[Mapping[str, str]], options: Options | None = None
) -> inference_pb2.GenerateRequest:
    """Request for a conversation: messages with `role` and `content`, oldest first.

    Raises:
        ValueError: a message has other keys.
    """
    request = _without_input(options or Options())
    for message in messages:
        if message.keys() != {"role", "content"}:
            raise ValueError(f"a message has a role and a content, got {sorted(message)}")
        request.messages.messages.add(role=message["role"], content=message["content"])
    request.messages.SetInParent()
    return request


def _without_input(options: Options) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(resume_token_ids=options.resume_token_ids, cache_salt=options.cache_salt)
    _set_what_is_given(request, options, "num_outputs")
    _set_what_is_given(request.sampling, options, "temperature", "top_k", "top_p", "min_p", "seed")
    _set_what_is_given(request.stopping, options, "max_tokens", "min_tokens", "ignore_eos")
    _set_what_is_given(request.response, options, "top_log_probs")
    _set_what_is_given(request.speculation, options, "max_nodes")
    request.stopping.stop_strings.extend(options.stop)
    if options.regex is not None:
        request.sampling.grammar.regex = options.regex
    if (schema := options.json_schema) is not None:
        request.sampling.grammar.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    _set_speculation(request.speculation, options.speculation)
    if options.denoising_steps is not None:
        request.speculation.denoising.steps = options.denoising_steps
    if options.block_tokens is not None:
        request.speculation.denoising.block_tokens = options.block_tokens
    if options.acceptance is not None:
        request.speculation.acceptance = ACCEPTANCE[options.acceptance]
    return request


def _set_what_is_given(message: Any, options: Options, *names: str) -> None:
    """Set the fields whose options are not None."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            setattr(message, name, value)


def _set_speculation(policy: inference_pb2.SpeculationPolicy, wanted: str) -> None:
    if wanted == "auto":
        policy.mode = inference_pb2.SpeculationPolicy.MODE_AUTO
    elif wanted == "off":
        policy.mode = inference_pb2.SpeculationPolicy.MODE_OFF
    else:
        policy.mode = inference_pb2.SpeculationPolicy.MODE_FORCED
        policy.sources.extend(name.strip() for name in wanted.split(",") if name.strip())


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    """google.rpc details of a status; those that cannot be read are left out."""
    found: list[Any] = []
    for key, value in error.trailing_metadata():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        with contextlib.suppress(DecodeError):
            for packed in status_pb2.Status.FromString(value).details:
                for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
                    detail = kind()
                    if packed.Unpack(detail):
                        found.append(detail)
    return found
