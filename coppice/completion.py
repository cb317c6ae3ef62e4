"""Completion as a client sees it: output, usage, speculation and timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.core.log_probs import TokenLogProbs
from coppice.v1 import inference_pb2, sampling_pb2, tree_pb2
from coppice.wire.convert import log_probs_from_proto

_REASON_PREFIX = "FINISH_REASON_"
_ORIGIN_PREFIX = "DRAFT_ORIGIN_"


@dataclass(frozen=True)
class Usage:
    """Prompt and completion tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True)
class SourceCounts:
    """Verified and accepted nodes of one source."""

    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class OriginCounts:
    """Rounds by origin of their draft, with its nodes and the accepted ones."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Speculation:
    """Counts of rounds; fields as in SpeculationStats of `inference.proto`."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    redraft_tokens: int = 0
    stale_drafts: int = 0
    # Tokens per round, the target's own included.
    mean_acceptance_length: float = 0.0
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)
    rounds_drafted_by_depth: tuple[int, ...] = ()
    rounds_accepted_by_depth: tuple[int, ...] = ()
    near_ties: int = 0
    # By origin of the draft: "fresh", "left_over", "rerooted", "ahead" or "redraft".
    origins: Mapping[str, OriginCounts] = field(default_factory=dict)
    # Rounds for which drafting ahead was requested; those whose outcome left the expected tree and was drafted for, by
    # rank; and those that verified another tree and ended inside the expected one, before a leaf.
    expected_outcomes: int = 0
    draft_ahead_hits_by_rank: tuple[int, ...] = ()
    outcomes_inside_expected: int = 0


@dataclass(frozen=True)
class PassTiming:
    """Passes with the same number of rows."""

    rows: int
    count: int
    total_ms: float


@dataclass(frozen=True)
class Timing:
    """Milliseconds measured by the server."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    # Per token after the first; 0 with a single token.
    tpot_ms: float = 0.0
    total_ms: float = 0.0
    forward_ms: float = 0.0
    linger_ms: float = 0.0
    bubble_ms: float = 0.0
    passes: tuple[PassTiming, ...] = ()
    # Parts of the time to the first token; meanings as in `inference.proto`.
    door_ms: float = 0.0
    prompt_ms: float = 0.0
    first_pass_ms: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One finished output."""

    request_id: str
    # Seed of this output; outputs of a request have different ones.
    seed: int
    text: str
    token_ids: tuple[int, ...]
    # "eos", "stop", "length" or "context_length".
    finish_reason: str
    stop_match: str | None
    usage: Usage
    speculation: Speculation
    timing: Timing
    # One per token, if requested.
    log_probs: tuple[TokenLogProbs, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Object printed by `coppice generate --json`."""
        speculation = self.speculation
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            **({"log_probs": [_log_probs_json(one) for one in self.log_probs]} if self.log_probs else {}),
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
            "speculation": {
                "rounds": speculation.rounds,
                "draft_tokens": speculation.draft_tokens,
                "accepted_tokens": speculation.accepted_tokens,
                "mean_acceptance_length": speculation.mean_acceptance_length,
                "sources": {
                    name: {"proposed": counts.proposed, "accepted": counts.accepted}
                    for name, counts in speculation.sources.items()
                },
                **({"near_ties": speculation.near_ties} if speculation.near_ties else {}),
            },
            "timing": {
                "ttft_ms": self.timing.ttft_ms,
                "tpot_ms": self.timing.tpot_ms,
                "total_ms": self.timing.total_ms,
            },
        }


def outputs_json(completions: Sequence[Completion]) -> dict[str, Any]:
    """Object printed by `coppice generate --json` for several outputs."""
    return {"outputs": [{"seed": completion.seed, **completion.as_json()} for completion in completions]}


def _log_probs_json(one: TokenLogProbs) -> dict[str, Any]:
    top = zip(one.top_token_ids, one.top_log_probs, strict=True)
    return {
        "log_prob": one.log_prob,
        "top": [{"token_id": token, "log_prob": log_prob} for token, log_prob in top],
    }


class CompletionBuilder:
    """Assembles an output from its messages; `completion` is set by the last one."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._log_probs: list[TokenLogProbs] = []
        self._request_id = ""
        self._seed = 0
        self.completion: Completion | None = None

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Add the output's next message."""
        self._text.append(message.text)
        self._token_ids.extend(message.token_ids)
        self._log_probs.extend(log_probs_from_proto(message.log_probs))
        if message.request_id:
            self._request_id, self._seed = message.request_id, message.seed
        if message.HasField("finished"):
            self.completion = self._finished(message)

    def _finished(self, last: inference_pb2.GenerateResponse) -> Completion:
        reason = sampling_pb2.FinishReason.Name(last.finished.reason).removeprefix(_REASON_PREFIX).lower()
        return Completion(
            request_id=self._request_id,
            seed=self._seed,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            stop_match=last.finished.stop_match if last.finished.HasField("stop_match") else None,
            usage=Usage(last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_prompt_tokens),
            speculation=_speculation(last.speculation, last.usage.completion_tokens),
            timing=_timing(last.timing, last.usage.completion_tokens),
            log_probs=tuple(self._log_probs),
        )


def _speculation(stats: inference_pb2.SpeculationStats, completion_tokens: int) -> Speculation:
    return Speculation(
        rounds=stats.rounds,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        redraft_tokens=stats.redraft_tokens,
        stale_drafts=stats.stale_drafts,
        mean_acceptance_length=completion_tokens / stats.rounds if stats.rounds else 0.0,
        sources={source.source: SourceCounts(source.proposed, source.accepted) for source in stats.sources},
        rounds_drafted_by_depth=tuple(stats.rounds_drafted_by_depth),
        rounds_accepted_by_depth=tuple(stats.rounds_accepted_by_depth),
        near_ties=stats.near_ties,
        origins={
            origin_name(one.origin): OriginCounts(one.rounds, one.draft_tokens, one.accepted_tokens)
            for one in stats.origins
        },
        expected_outcomes=stats.expected_outcomes,
        draft_ahead_hits_by_rank=tuple(stats.draft_ahead_hits_by_rank),
        outcomes_inside_expected=stats.outcomes_inside_expected,
    )


def origin_name(origin: tree_pb2.DraftOrigin) -> str:
    """Name of a draft's origin; unknown ones of a newer server are numbers."""
    if origin not in tree_pb2.DraftOrigin.values():
        return str(origin)
    return tree_pb2.DraftOrigin.Name(origin).removeprefix(_ORIGIN_PREFIX).lower()


def _timing(timing: inference_pb2.Timing, completion_tokens: int) -> Timing:
    after_first = completion_tokens - 1
    return Timing(
        queue_ms=timing.queue_ms,
        ttft_ms=timing.ttft_ms,
        tpot_ms=(timing.total_ms - timing.ttft_ms) / after_first if after_first > 0 else 0.0,
        total_ms=timing.total_ms,
        forward_ms=timing.forward_ms,
        linger_ms=timing.linger_ms,
        door_ms=timing.door_ms,
        prompt_ms=timing.prompt_ms,
        first_pass_ms=timing.first_pass_ms,
        bubble_ms=timing.bubble_ms,
        passes=tuple(PassTiming(one.rows, one.count, one.total_ms) for one in timing.passes),
    )
