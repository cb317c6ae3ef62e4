"""One peer's sequences as spans, from the messages that pass the door. Attributes are named as in docs/traces.md."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.net.rpc import status_code_name
from coppice.obs.tracing import Span, Tracer
from coppice.v1 import drafter_pb2

_FAULTS = frozenset({"internal", "unavailable"})


@dataclass
class _Sequence:
    span: Span
    num_prompt: int
    outcomes: int = 0
    tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    draft_us: int = 0


class SequenceTraces:
    """A span for each sequence of one stream, with what its drafts add up to."""

    def __init__(self, tracer: Tracer, kind: str) -> None:
        self._tracer = tracer
        self._kind = kind
        self._open: dict[int, _Sequence] = {}

    def heard(self, message: drafter_pb2.DraftRequest) -> None:
        """The peer opens a sequence, tells of its round, or closes it."""
        kind = message.WhichOneof("event")
        if kind == "open" and message.sequence_id not in self._open:
            span = self._tracer.begin("draft", message.open.traceparent, serves=True)
            self._open[message.sequence_id] = _Sequence(span, len(message.open.prompt_token_ids))
        elif kind == "outcome" and (sequence := self._open.get(message.sequence_id)) is not None:
            sequence.outcomes += 1
            sequence.tokens += len(message.outcome.token_ids)
        elif kind == "close":
            self._end(message.sequence_id)

    def told(self, message: drafter_pb2.DraftResponse) -> None:
        """The peer gets a tree, or hears that there will be none."""
        sequence = self._open.get(message.sequence_id)
        if sequence is None:
            return
        if message.HasField("error"):
            self._end(message.sequence_id, status_code_name(message.error.code).lower())
        elif message.HasField("tree"):
            sequence.drafts += 1
            sequence.draft_tokens += len(message.tree.tree.token_ids)
            sequence.draft_us += message.tree.draft_us

    def over(self) -> None:
        """The stream has ended, and its sequences with it."""
        for sequence_id in list(self._open):
            self._end(sequence_id)

    def _end(self, sequence_id: int, error: str = "") -> None:
        sequence = self._open.pop(sequence_id, None)
        if sequence is None:
            return
        sequence.span.end(
            {
                "coppice.source": self._kind,
                "gen_ai.usage.input_tokens": sequence.num_prompt,
                "coppice.outcomes": sequence.outcomes,
                "coppice.committed_tokens": sequence.tokens,
                "coppice.drafts": sequence.drafts,
                "coppice.draft_tokens": sequence.draft_tokens,
                "coppice.draft_ms": sequence.draft_us / 1000,
                **({"error.type": error} if error else {}),
            },
            failed=error in _FAULTS,
        )
