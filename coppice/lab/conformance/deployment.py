"""The deployment under test: its client, what it says of itself, and prompts in its own vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from coppice.client import Client, RequestFailedError, Stream
from coppice.completion import Completion
from coppice.lab.conformance.errors import FailureError, SkippedError, UnsuitableError
from coppice.lab.conformance.reference import ReferenceModel
from coppice.lab.conformance.requests import OFF, build, varied
from coppice.net.access_token import bearer_metadata
from coppice.net.certificates import Certificates
from coppice.net.rpc import open_channel
from coppice.net.tls import ChannelTls
from coppice.v1 import inference_pb2_grpc, sampling_pb2
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse, GetModelInfoResponse

# What these texts say does not matter: prompts are what the target itself says after them.
OPENINGS = ("The ", "import os\n", "1, 2, ")
PROMPT_TOKENS = 12
# Enough for a prompt and a usual output. No case makes sense below it.
MIN_CONTEXT_TOKENS = 64


def is_strict(info: GetModelInfoResponse) -> bool:
    """Whether outputs are promised bit for bit."""
    return info.exactness == sampling_pb2.EXACTNESS_STRICT


class Deployment:
    """Asks one deployment. Answers of plain decoding are remembered, since many cases compare with them.

    `info` is what it says of itself; `prompts` are token ids that its target is likely to meet.
    """

    def __init__(
        self,
        client: Client,
        channel: grpc.aio.Channel,
        info: GetModelInfoResponse,
        prompts: Sequence[tuple[int, ...]],
        timeout_s: float,
        token: str = "",
    ) -> None:
        self.client = client
        self._metadata = bearer_metadata(token)
        self.info = info
        self.prompts = prompts
        self.is_strict = is_strict(info)
        self.timeout_s = timeout_s
        # The checkpoint that is served, where it is at hand.
        self.reference: ReferenceModel | None = None
        # How often a sequence had to make room for others so far, where that is known.
        self.num_preemptions: Callable[[], int] | None = None
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._plain: dict[bytes, Completion] = {}

    def requests(self, **knobs: Any) -> list[GenerateRequest]:
        """A request for each prompt, which the model's own end token does not end; knobs as in `varied`."""
        return [build(prompt, **{"ignore_eos": True, **knobs}) for prompt in self.prompts]

    def request(self, **knobs: Any) -> GenerateRequest:
        return self.requests(**knobs)[0]

    async def ask(self, request: GenerateRequest) -> Completion:
        """The answer to a request. Raises FailureError if it was refused or failed."""
        try:
            return await self.client.send(request, self.timeout_s)
        except RequestFailedError as error:
            raise FailureError(str(error), request) from error

    async def outputs(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """Every output of a request.

        Raises SkippedError if the deployment has no place for so many. Raises FailureError if the request was refused
        or failed.
        """
        stream = self.start(request)
        try:
            async for _ in stream:
                pass
        except RequestFailedError as error:
            raise _among_others(error, request) from error
        return stream.results()

    async def leave(self, request: GenerateRequest, after: int = 1) -> tuple[list[int], str]:
        """Tokens and text of an answer that is cancelled after so many tokens or a few more.

        Raises SkippedError if the deployment has no place for it. Raises FailureError if it was refused or failed.
        """
        tokens: list[int] = []
        text = ""
        stream = self.start(request)
        try:
            async for chunk in stream:
                tokens.extend(chunk.token_ids)
                text += chunk.text
                if len(tokens) >= after:
                    break
        except RequestFailedError as error:
            raise _among_others(error, request) from error
        stream.cancel()
        return tokens, text

    async def plain(self, request: GenerateRequest) -> Completion:
        """The answer to a request with speculation off."""
        request = varied(request, mode=OFF)
        key = request.SerializeToString(deterministic=True)
        if key not in self._plain:
            self._plain[key] = await self.ask(request)
        return self._plain[key]

    def start(self, request: GenerateRequest, timeout_s: float | None = None) -> Stream:
        """The answer to a request, chunk by chunk."""
        return self.client.stream_request(request, self.timeout_s if timeout_s is None else timeout_s)

    async def messages(self, request: GenerateRequest) -> list[GenerateResponse]:
        """The messages of an answer as they come, which the client joins.

        Raises FailureError if it was refused or failed.
        """
        try:
            call = self._stub.Generate(request, timeout=self.timeout_s, metadata=self._metadata)
            return [message async for message in call]
        except grpc.aio.AioRpcError as error:
            raise FailureError(f"{error.code().name}: {error.details()}", request) from error


def _among_others(error: RequestFailedError, request: GenerateRequest) -> FailureError | SkippedError:
    """What the error of one of several outputs means: a tenant may have fewer places than a case needs."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return SkippedError(f"no place for so many outputs: {error.details}")
    return FailureError(str(error), request)


@contextlib.asynccontextmanager
async def connected(
    address: str, timeout_s: float, tls: ChannelTls | None = None, token: str = ""
) -> AsyncIterator[Deployment]:
    """The deployment that serves at an address; each of its requests may take `timeout_s`.

    Raises RequestFailedError if it does not answer. Raises UnsuitableError if no case could run. Raises TlsError if a
    file of `tls` cannot be used.
    """
    certificates = None if tls is None else Certificates(tls)
    async with (
        Client(address, token=token, tls=tls) as client,
        open_channel(address, certificates=certificates) as channel,
    ):
        info = await client.model_info(timeout_s)
        if info.max_context_tokens < MIN_CONTEXT_TOKENS:
            raise UnsuitableError(f"a context of {info.max_context_tokens} tokens; {MIN_CONTEXT_TOKENS} are needed")
        yield Deployment(client, channel, info, await _prompts(client, info, timeout_s), timeout_s, token)


async def _prompts(client: Client, info: GetModelInfoResponse, timeout_s: float) -> list[tuple[int, ...]]:
    prompts = []
    for seed, opening in enumerate(OPENINGS):
        request = build(opening, max_tokens=PROMPT_TOKENS, ignore_eos=True, temperature=1.0, seed=seed, mode=OFF)
        request = varied(request, bad_token_ids=info.eos_token_ids)
        prompts.append((await client.send(request, timeout_s)).token_ids)
    return prompts
