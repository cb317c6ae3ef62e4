"""Drafts of sequences that are not open are dropped before their trees are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.v1 import sampling_pb2, tree_pb2
from coppice.v1 import verifier_pb2 as pb
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from tests.unit.verifier_svc.toy_pass import toy_info
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.engine.sequence import Draft, SequenceKey
from verifier_svc.stream import request_parser
from verifier_svc.stream.events import CompleteEvent, DraftRejection, ErrorEvent, Event, OutcomeEvent
from verifier_svc.stream.verify_stream import VerifyStream
from verifier_svc.verify.output_end import FinishReason, SequenceFinish

VOCAB = 3
TREE = tree_pb2.TokenTree(token_ids=[1, 2], parents=[-1, 0])
MALFORMED = tree_pb2.TokenTree(token_ids=[1, 2], parents=[-1, 1])


class TellingEngine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.submitted: list[tuple[SequenceKey, Draft]] = []

    def open(self, key: SequenceKey, spec: object) -> None:
        pass

    def submit(self, key: SequenceKey, draft: Draft) -> None:
        self.submitted.append((key, draft))

    def close(self, key: SequenceKey) -> None:
        pass


class Peer:
    """A stream without a network."""

    def __init__(self) -> None:
        self.engine: Any = TellingEngine()
        self.responses: list[pb.VerifyResponse] = []
        info = toy_info(VOCAB, byte_level_tokenizer([b"a", b"b", b"c"]), (2,), 12)
        self._stream = VerifyStream(self.engine, info, 0, self._write)

    async def _write(self, response: pb.VerifyResponse) -> None:
        self.responses.append(response)

    def open(self, number: int, **fields: Any) -> None:
        opening = pb.OpenSequence(prompt_token_ids=[0, 1], **fields)
        self._stream._parser.take(pb.VerifyRequest(sequence_id=number, open=opening))

    def draft(self, number: int, tree: tree_pb2.TokenTree = TREE) -> int:
        """Send a draft; returns how many the engine has had."""
        self._stream._parser.take(pb.VerifyRequest(sequence_id=number, draft=pb.Draft(base_length=2, tree=tree)))
        return len(self.engine.submitted)

    def close(self, number: int) -> None:
        self._stream._parser.take(pb.VerifyRequest(sequence_id=number, close=pb.CloseSequence()))

    def hear(self, events: Sequence[Event]) -> None:
        self._stream.deliver(events)


async def test_drafts_go_to_sequences_that_are_open_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    peer.open(1)
    assert peer.draft(1) == 1
    # From here on a tree that is looked at fails the test.
    monkeypatch.setattr(request_parser, "tree_from_proto", None)
    assert peer.draft(2) == 1
    peer.close(1)
    assert peer.draft(1) == 1
    peer.open(3, sampling=sampling_pb2.SamplingParams(temperature=-1.0))
    assert peer.draft(3) == 1


@pytest.mark.parametrize(
    "last",
    [
        CompleteEvent(1, SequenceFinish(FinishReason.LENGTH), 0.0),
        ErrorEvent(1, InvalidRequestError("prompt_token_ids", "is unlucky")),
        OutcomeEvent(1, RoundOutcome(2, (1,), (), 0, 0, 0.0, 0, SequenceFinish(FinishReason.LENGTH)), 1, 0.0, 0.0, 0),
    ],
)
async def test_a_sequence_that_has_ended_takes_no_more_drafts(last: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    peer.open(1)
    peer.open(2)
    peer.hear([last])
    assert peer.draft(2) == 1
    monkeypatch.setattr(request_parser, "tree_from_proto", None)
    assert peer.draft(1) == 1


async def test_a_malformed_draft_of_an_open_sequence_is_rejected_and_the_sequence_goes_on() -> None:
    peer = Peer()
    peer.open(1)
    heard: list[Event] = []
    peer._stream._parser._tell = heard.extend
    assert peer.draft(1, MALFORMED) == 0
    assert [type(event) for event in heard] == [DraftRejection]
    assert peer.draft(1) == 1
