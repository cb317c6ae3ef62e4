"""Messages of the public API for an output."""

from __future__ import annotations

from coppice.core.tokenizer import TargetTokenizer
from coppice.v1 import inference_pb2
from coppice.wire.convert import log_probs_to_proto
from orchestrator.api.validation import GenerationRequest
from orchestrator.request.generation import Generation
from orchestrator.request.output_text import OutputDelta
from orchestrator.request.rounds import Finish
from orchestrator.request.statistics import OutputClock, Statistics


class Responses:
    """Builds one output's messages; the first one has the id, the seed and the length of the prompt."""

    def __init__(self, request: GenerationRequest, output_index: int, tokenizer: TargetTokenizer) -> None:
        self._request = request
        self._output_index = output_index
        self._tokenizer = tokenizer
        self._is_first = True

    def delta(self, delta: OutputDelta) -> inference_pb2.GenerateResponse | None:
        """Message for a delta; None if it has nothing that the client wants."""
        if not self._request.want_token_ids and not delta.text and not delta.log_probs:
            return None
        return self._message(delta)

    def last(self, generation: Generation, finish: Finish) -> inference_pb2.GenerateResponse:
        """Message that ends the output."""
        message = self._message(generation.take())
        message.finished.reason = finish.reason
        if finish.stop_match is not None:
            message.finished.stop_match = finish.stop_match
        message.usage.prompt_tokens = len(self._request.prompt_ids)
        message.usage.completion_tokens = generation.num_generated
        # A resumed call may also find the earlier call's output cached.
        message.usage.cached_prompt_tokens = min(finish.cached_tokens, len(self._request.prompt_ids))
        message.speculation.CopyFrom(_speculation(generation.statistics))
        message.timing.CopyFrom(_timing(generation.statistics, generation.clock))
        return message

    def _message(self, delta: OutputDelta) -> inference_pb2.GenerateResponse:
        token_ids = delta.token_ids if self._request.want_token_ids else ()
        message = inference_pb2.GenerateResponse(
            text=delta.text,
            token_ids=token_ids,
            log_probs=log_probs_to_proto(delta.log_probs),
            output_index=self._output_index,
        )
        if self._request.want_token_bytes:
            for token, one in zip(delta.token_ids, message.log_probs, strict=False):
                one.token = self._tokenizer.token_bytes(token)
                one.top_tokens.extend(map(self._tokenizer.token_bytes, one.top_token_ids))
        if self._is_first:
            message.request_id = self._request.request_id
            message.seed = self._request.sampling.seed
            message.prompt_tokens = len(self._request.prompt_ids)
            self._is_first = False
        return message


def _speculation(statistics: Statistics) -> inference_pb2.SpeculationStats:
    return inference_pb2.SpeculationStats(
        rounds=statistics.rounds,
        draft_tokens=statistics.draft_tokens,
        accepted_tokens=statistics.accepted_tokens,
        redraft_tokens=statistics.redraft_tokens,
        sources=[
            inference_pb2.SourceStats(source=name, proposed=counts.proposed, accepted=counts.accepted)
            for name, counts in sorted(statistics.sources.items())
        ],
        rounds_drafted_by_depth=statistics.rounds_drafted_by_depth,
        rounds_accepted_by_depth=statistics.rounds_accepted_by_depth,
        stale_drafts=statistics.stale_drafts,
        near_ties=statistics.near_ties,
        origins=[
            inference_pb2.OriginStats(
                origin=origin,
                rounds=counts.rounds,
                draft_tokens=counts.draft_tokens,
                accepted_tokens=counts.accepted_tokens,
            )
            for origin, counts in sorted(statistics.origins.items())
        ],
        expected_outcomes=statistics.ahead.expected,
        draft_ahead_hits_by_rank=statistics.ahead.hits_by_rank,
        outcomes_inside_expected=statistics.ahead.inside,
    )


def _timing(statistics: Statistics, clock: OutputClock) -> inference_pb2.Timing:
    return inference_pb2.Timing(
        queue_ms=clock.queue_ms,
        door_ms=clock.door_ms,
        prompt_ms=clock.prompt_ms,
        first_pass_ms=clock.first_pass_ms,
        ttft_ms=clock.ttft_ms,
        total_ms=clock.elapsed_ms(),
        forward_ms=statistics.forward_us / 1000,
        linger_ms=statistics.linger_us / 1000,
        passes=[
            inference_pb2.PassTiming(rows=rows, count=passes.count, total_ms=passes.total_us / 1000)
            for rows, passes in sorted(statistics.passes.items())
        ],
        bubble_ms=statistics.bubble_us / 1000,
    )
