"""Deployments that say something else than is true, or do not let go of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coppice.v1 import sampling_pb2
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse
from tests.toy_deployment import ToyDeployment
from tests.toy_target import VOCAB


class Talker(ToyDeployment):
    """Says something else than is true, as `edit` has it."""

    def __init__(self, edit: Callable[[GenerateResponse], None], *, last: bool = True) -> None:
        super().__init__()
        self._edit, self._last = edit, last

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") or not self._last:
            self._edit(message)


def miscounts(part: str, name: str, by: int) -> Callable[[], ToyDeployment]:
    def edit(message: GenerateResponse) -> None:
        holder = getattr(message, part)
        setattr(holder, name, getattr(holder, name) + by)

    return lambda: Talker(edit)


def says_stop(message: GenerateResponse) -> None:
    message.finished.reason = sampling_pb2.FINISH_REASON_STOP


def says_twice(message: GenerateResponse) -> None:
    message.text = message.text * 2


def says_another_seed(message: GenerateResponse) -> None:
    message.seed += 1


def says_the_first_output(message: GenerateResponse) -> None:
    message.output_index = 0


def counts_all_along(message: GenerateResponse) -> None:
    message.usage.prompt_tokens = 1


class AddsText(ToyDeployment):
    """Says more when its token ids are not wanted."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") and request.response.HasField("token_ids"):
            message.text += "!"


class LosesATokenAtResume(ToyDeployment):
    """Takes one more token for delivered than was."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if request.resume_token_ids and message.HasField("finished"):
            del message.token_ids[-1:]


class LetsNobodyShare(ToyDeployment):
    """Says of a later output that nothing of its prompt was there, and of the first that all was."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if message.HasField("finished") and request.num_outputs > 1:
            message.usage.cached_prompt_tokens = 0 if message.output_index == 1 else 10 * message.output_index


class Changing(ToyDeployment):
    """Has another version each time."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = await super().GetModelInfo(request, context)
        self.num_requests += 1
        info.version = str(self.num_requests)
        return info


class Boasting(ToyDeployment):
    """Says that its vocabulary is larger than it is."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = await super().GetModelInfo(request, context)
        info.vocab_size = VOCAB + 1
        return info


class Leaky(ToyDeployment):
    """Never frees what a cancelled stream held."""

    def leave(self, ended: bool) -> None:
        self.num_running -= ended
