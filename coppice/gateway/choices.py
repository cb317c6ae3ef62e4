"""Choices of an answer in the shapes of both APIs, whole and in chunks, from the messages of an output."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coppice.gateway.errors import broken_answer
from coppice.gateway.tool_calls import AnswerParser, AnswerPiece, CallDelta, ReasoningDelta
from coppice.v1 import inference_pb2, sampling_pb2

_LENGTHS = (sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_CONTEXT_LENGTH)


class AnswerChoice(Protocol):
    """One choice of an answer, which grows message by message."""

    # So far; tokens only where the request has asked for their ids.
    usage: inference_pb2.Usage
    # Empty until the choice has ended.
    statistics: dict[str, Any]

    def add(self, message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
        """Add the output's next message; returns the choice of a chunk, None if there is nothing to say.

        Raises:
            ApiError: its log-probabilities do not fit together.
        """

    def whole(self) -> dict[str, Any]:
        """The choice of an answer in one piece, after the last message."""


@dataclass(frozen=True)
class Wanted:
    """Parts of an answer that a request asks for."""

    log_probs: bool = False
    token_ids: bool = False


class _Choice:
    """Parts of a choice that both APIs have."""

    def __init__(self, index: int, wanted: Wanted) -> None:
        self._index = index
        self._wanted = wanted
        self._seed = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_match: str | None = None
        self.statistics: dict[str, Any] = {}
        self.usage = inference_pb2.Usage()

    def _read(self, message: inference_pb2.GenerateResponse) -> None:
        if message.HasField("seed"):
            self._seed = message.seed
        if message.HasField("prompt_tokens"):
            self.usage.prompt_tokens = message.prompt_tokens
        self.usage.completion_tokens += len(message.token_ids)
        self._token_ids.extend(message.token_ids)
        if not message.HasField("finished"):
            return
        self._finish_reason = "length" if message.finished.reason in _LENGTHS else "stop"
        if message.finished.reason == sampling_pb2.FINISH_REASON_STOP and message.finished.HasField("stop_match"):
            self._stop_match = message.finished.stop_match
        self.usage = message.usage
        self.statistics = _statistics(message, self._seed)

    def _ended(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Fields of a chunk or answer beyond text: its end, and what is not of OpenAI's API."""
        fields: dict[str, Any] = {"finish_reason": self._finish_reason}
        if self._wanted.token_ids:
            fields["token_ids"] = list(token_ids)
        if self._finish_reason is not None:
            fields |= {"stop_reason": self._stop_match, "coppice": self.statistics}
        return fields


class ChatChoice(_Choice):
    """A choice of /v1/chat/completions."""

    def __init__(self, index: int, wanted: Wanted, parser: AnswerParser) -> None:
        super().__init__(index, wanted)
        self._parser = parser
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._log_probs: list[dict[str, Any]] = []
        self._has_begun = False

    def add(self, message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
        """Add the output's next message; returns the choice of a chunk, None if there is nothing to say."""
        self._read(message)
        log_probs = [_chat_log_prob(one) for one in message.log_probs]
        self._log_probs += log_probs
        ended = message.HasField("finished")
        delta = self._delta(self._parser.push(message.text, ended))
        if ended and self._calls and self._finish_reason == "stop":
            self._finish_reason = "tool_calls"
        if not (delta or log_probs or message.token_ids or ended):
            return None
        if not self._has_begun:
            self._has_begun = True
            delta = {"role": "assistant", "content": "", **delta}
        shown = {"content": log_probs} if self._wanted.log_probs and log_probs else None
        return {"index": self._index, "delta": delta, "logprobs": shown, **self._ended(message.token_ids)}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer in one piece, after the last message."""
        content = "".join(self._text)
        answer: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(self._reasoning):
            answer["reasoning_content"] = reasoning
        if self._calls:
            answer |= {"content": content or None, "tool_calls": self._calls}
        shown = {"content": self._log_probs} if self._wanted.log_probs else None
        return {"index": self._index, "message": answer, "logprobs": shown, **self._ended(self._token_ids)}

    def _delta(self, pieces: Sequence[AnswerPiece]) -> dict[str, Any]:
        """Reasoning, content and calls of a chunk, which are also put to those before."""
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [self._call(piece) for piece in pieces if isinstance(piece, CallDelta)]
        self._text.append(content)
        self._reasoning.append(reasoning)
        reasoned = {"reasoning_content": reasoning} if reasoning else {}
        return reasoned | ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _call(self, part: CallDelta) -> dict[str, Any]:
        if part.id is None:
            self._calls[part.index]["function"]["arguments"] += part.arguments
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        self._calls.append({"id": part.id, "type": "function", "function": dict(function)})
        return {"index": part.index, "id": part.id, "type": "function", "function": function}


class CompletionChoice(_Choice):
    """A choice of /v1/completions."""

    def __init__(self, index: int, wanted: Wanted) -> None:
        super().__init__(index, wanted)
        self._log_probs = _CompletionLogProbs() if wanted.log_probs else None

    def add(self, message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
        """Add the output's next message; returns the choice of a chunk, None if there is nothing to say."""
        self._read(message)
        self._text.append(message.text)
        shown = self._log_probs.add(message.log_probs) if self._log_probs and message.log_probs else None
        if not (message.text or shown or message.token_ids or message.HasField("finished")):
            return None
        return {"index": self._index, "text": message.text, "logprobs": shown, **self._ended(message.token_ids)}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer in one piece, after the last message."""
        shown = self._log_probs.fields if self._log_probs else None
        return {"index": self._index, "text": "".join(self._text), "logprobs": shown, **self._ended(self._token_ids)}


class _CompletionLogProbs:
    """Log-probabilities in the shape of /v1/completions: lists with an entry per token.

    Offsets count characters of all tokens so far, whole ones only.
    """

    def __init__(self) -> None:
        self.fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, log_probs: Sequence[inference_pb2.TokenLogProbs]) -> dict[str, list[Any]]:
        """Add the next tokens; returns the fields of these alone."""
        new: dict[str, list[Any]] = {name: [] for name in self.fields}
        for one in log_probs:
            new["tokens"].append(token_text(one.token))
            new["token_logprobs"].append(one.log_prob)
            new["top_logprobs"].append({token_text(token): log_prob for token, log_prob in _likeliest(one)})
            new["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(one.token))
        for name, values in new.items():
            self.fields[name] += values
        return new


def token_text(token: bytes) -> str:
    """A token as text; one that is no whole characters as OpenAI writes it, `bytes:` and hexadecimal escapes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_log_prob(one: inference_pb2.TokenLogProbs) -> dict[str, Any]:
    top = [_chat_token(*likely) for likely in _likeliest(one)]
    return {**_chat_token(one.token, one.log_prob), "top_logprobs": top}


def _likeliest(one: inference_pb2.TokenLogProbs) -> Iterator[tuple[bytes, float]]:
    """The likeliest tokens with their log-probabilities."""
    if len(one.top_tokens) != len(one.top_log_probs):
        raise broken_answer("as many log-probabilities as tokens are needed")
    return zip(one.top_tokens, one.top_log_probs, strict=True)


def _chat_token(token: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": log_prob, "bytes": list(token)}


def _statistics(message: inference_pb2.GenerateResponse, seed: int) -> dict[str, Any]:
    """The field `coppice` of a finished choice: its seed, and how it was made."""
    stats, timing = message.speculation, message.timing
    tokens = message.usage.completion_tokens
    return {
        "seed": seed,
        "rounds": stats.rounds,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "mean_acceptance_length": tokens / stats.rounds if stats.rounds else 0.0,
        "sources": {one.source: {"proposed": one.proposed, "accepted": one.accepted} for one in stats.sources},
        "near_ties": stats.near_ties,
        "queue_ms": timing.queue_ms,
        "ttft_ms": timing.ttft_ms,
        "total_ms": timing.total_ms,
    }


def usage_fields(choices: Mapping[int, AnswerChoice], num_outputs: int) -> dict[str, Any]:
    """`usage` of an answer so far; every `num_outputs` choices share a prompt, which counts once."""
    prompts = {index // num_outputs: choices[index] for index in sorted(choices, reverse=True)}.values()
    prompt_tokens = sum(choice.usage.prompt_tokens for choice in prompts)
    completion_tokens = sum(choice.usage.completion_tokens for choice in choices.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.usage.cached_prompt_tokens for choice in prompts)},
    }
