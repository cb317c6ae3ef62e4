"""A session takes in whatever has queued up and drafts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.errors import InvalidRequestError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.model.prefix_blocks import PrefixBlocks
from drafter_svc.session import Session, SessionDraft, SessionOpening, SessionOutcome


class CountingSequence:
    """Drafts a chain of as many nodes as asked for, and notes what it was told."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids = list(prompt)
        self.drafts: list[int] = []
        self.multiples: list[int] = []
        self.features: list[bytes] = []
        self.num_prepared = 0

    def extend(self, token_ids: Sequence[int], features: bytes) -> None:
        self.token_ids.extend(token_ids)
        self.features.append(features)

    def read(self, max_pieces: int) -> int:
        return 0

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        self.drafts.append(max_nodes)
        self.multiples.append(row_multiple)
        return chain(range(max_nodes))

    def prepare(self) -> None:
        self.num_prepared += 1


class CountingDrafter:
    info = DrafterInfo("counting", "none", "", vocab_size=100, max_length=50)
    prefixes = PrefixBlocks(0)

    def __init__(self) -> None:
        self.sequences: list[CountingSequence] = []

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> CountingSequence:
        self.sequences.append(CountingSequence(prompt))
        return self.sequences[-1]

    def warm_up(self) -> None: ...


def test_a_prompt_is_as_long_as_the_drafter_takes_it() -> None:
    SessionOpening((1,) * 50, SamplingParams(), 4).check(CountingDrafter.info)
    with pytest.raises(InvalidRequestError, match="51 tokens, more than the context of 50"):
        SessionOpening((1,) * 51, SamplingParams(), 4).check(CountingDrafter.info)
    SessionOpening((1,) * 51, SamplingParams(), 4).check(replace(CountingDrafter.info, max_length=0))


def new_session(max_nodes: int = 4) -> tuple[Session, CountingDrafter]:
    drafter = CountingDrafter()
    return Session(drafter, SessionOpening((1, 2, 3), SamplingParams(), max_nodes), AcceptanceMap()), drafter


def outcome(
    base_length: int, *token_ids: int, max_nodes: int | None = None, row_multiple: int | None = None
) -> SessionOutcome:
    return SessionOutcome(base_length, token_ids, b"f%d" % base_length, max_nodes, row_multiple)


def test_outcomes_that_wait_are_all_taken_in_before_one_draft() -> None:
    session, drafter = new_session()
    session.post(outcome(3, 7, 8))
    session.post(outcome(5, 9, max_nodes=2, row_multiple=8))
    assert session.advance() == SessionDraft(6, chain(range(2)))
    [sequence] = drafter.sequences
    assert sequence.token_ids == [1, 2, 3, 7, 8, 9]
    assert sequence.features == [b"f3", b"f5"]
    assert sequence.drafts == [2]
    assert sequence.multiples == [8]


def test_one_job_is_scheduled_until_it_runs() -> None:
    session, drafter = new_session()
    assert session.schedule()
    assert not session.schedule()
    assert session.advance() is not None
    assert session.schedule()
    assert session.advance() is None
    assert drafter.sequences[0].drafts == [4]
    assert drafter.sequences[0].multiples == [1]


def test_a_wrong_base_length_is_refused() -> None:
    session, _ = new_session()
    session.post(outcome(3, 7))
    session.post(outcome(3, 7))
    with pytest.raises(InvalidRequestError, match=r"outcome\.base_length: is 3, but 4 tokens"):
        session.advance()


def test_a_closed_session_prepares_nothing() -> None:
    session, drafter = new_session()
    session.prepare()
    session.advance()
    session.prepare()
    session.closed = True
    session.prepare()
    assert drafter.sequences[0].num_prepared == 1


class ToldDrafter(CountingDrafter):
    """Notes how it is to denoise."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Denoising] = []

    def open_denoising(
        self, prompt: Sequence[int], sampling: SamplingParams, denoising: Denoising, cache_salt: str = ""
    ) -> CountingSequence:
        self.told.append(denoising)
        return self.open(prompt, sampling, cache_salt)


def test_a_drafter_that_denoises_is_told_how_a_request_wants_it() -> None:
    drafter = ToldDrafter()
    for denoising in (LEFT_TO_DRAFTER, Denoising(steps=2), Denoising(block_tokens=3)):
        opening = SessionOpening((1, 2), SamplingParams(), 4, denoising=denoising)
        assert Session(drafter, opening, AcceptanceMap()).advance() is not None
    assert drafter.told == [Denoising(steps=2), Denoising(block_tokens=3)]
    assert len(drafter.sequences) == 3
