"""Sequences that have to forget: the right ones, and their drafts are what they would have been."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from coppice.core.sampling import SamplingParams
from coppice.settings import ConfigError
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.config import DrafterConfig
from drafter_svc.model.cache_budget import CacheBudget, CachingSequence
from drafter_svc.session import Session, SessionOpening, SessionOutcome
from tests.unit.drafter_svc.drafters.small_lm import test_small_lm
from tests.unit.drafter_svc.model.test_draft_context import CASES, KINDS, VOCAB, llama

__all__ = ["llama"]


class Keeper:
    """Keeps so many tokens."""

    def __init__(self, num_cached: int) -> None:
        self.num_cached = num_cached
        self.times_forgotten = 0

    def forget(self) -> None:
        self.times_forgotten += 1
        self.num_cached = 0


def test_whoever_was_drafted_for_longest_ago_forgets() -> None:
    budget = CacheBudget(100)
    first, second, third, fourth = (Keeper(30) for _ in range(4))
    for keeper in (first, second, third, first):
        budget.note(keeper)
    assert (budget.num_tokens, budget.num_forgotten) == (90, 0)
    budget.note(fourth)
    assert [one.times_forgotten for one in (first, second, third, fourth)] == [0, 1, 0, 0]
    assert (budget.num_tokens, budget.num_forgotten) == (90, 1)
    # More than there is room for is left to the one that needs it.
    fourth.num_cached = 500
    budget.note(fourth)
    assert [one.times_forgotten for one in (first, second, third, fourth)] == [1, 1, 1, 0]
    assert (budget.num_tokens, budget.num_forgotten) == (500, 3)
    second.num_cached = 10
    budget.note(second)
    assert (fourth.times_forgotten, second.times_forgotten, budget.num_tokens) == (1, 1, 10)


def test_those_that_have_ended_count_no_more() -> None:
    budget = CacheBudget(100)
    gone, stays = Keeper(90), Keeper(60)
    budget.note(gone)
    del gone
    gc.collect()
    budget.note(stays)
    assert (budget.num_tokens, budget.num_forgotten, stays.times_forgotten) == (60, 0, 0)


def test_without_a_limit_nothing_is_forgotten_and_others_have_nothing_to_forget() -> None:
    budget = CacheBudget()
    keepers = [Keeper(10**6) for _ in range(3)]
    for keeper in (*keepers, object()):
        budget.note(keeper)
    assert (budget.num_tokens, budget.num_forgotten) == (3 * 10**6, 0)
    assert DrafterConfig(model="model").max_cached_tokens > 0
    with pytest.raises(ConfigError, match="MAX_CACHED_TOKENS"):
        DrafterConfig(model="model", max_cached_tokens=-1)


@dataclass
class Forgetful:
    """Keeps nothing. It compares by value, so it is not hashable."""


def test_one_that_keeps_nothing_has_not_forgotten_and_need_not_be_hashable() -> None:
    budget = CacheBudget(1)
    budget.note(Forgetful())
    assert not budget.has_forgotten(Forgetful())


@pytest.mark.parametrize(("kind", "temperature"), CASES)
@pytest.mark.parametrize("most", [0, 24], ids=["whole", "cut"])
def test_drafts_of_one_that_forgot_are_what_they_would_have_been(
    llama: LlamaForCausalLM, kind: str, temperature: float, most: int
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, VOCAB, 70 if most else 9).tolist()
    forgetful, other = (KINDS[kind](llama, most, prompt, sampling) for _ in range(2))
    for step in range(5):
        tree, expected = forgetful.draft(8), other.draft(8)
        assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
        assert tree.log_probs == pytest.approx(expected.log_probs, abs=1e-3)
        committed = [expected.token_ids[0], int(rng.integers(0, VOCAB))]
        if step % 2:
            assert forgetful.num_cached > 8
            forgetful.forget()
            assert forgetful.num_cached == 0
            # Nor does it take part in what it was told before.
            forgetful.prepare()
        for sequence in (forgetful, other):
            sequence.extend(committed)
            sequence.prepare()


def test_sessions_share_the_room(llama: LlamaForCausalLM) -> None:
    drafter = test_small_lm.make_drafter(llama)
    budget = CacheBudget(24)
    sessions = [
        Session(drafter, SessionOpening((5, 9, 2, number), SamplingParams(), 8), AcceptanceMap(), budget)
        for number in (1, 2)
    ]
    alone = [
        Session(drafter, SessionOpening((5, 9, 2, number), SamplingParams(), 8), AcceptanceMap()) for number in (1, 2)
    ]
    for length in range(4, 12):
        for session, other in zip(sessions, alone, strict=True):
            draft, expected = session.advance(), other.advance()
            assert draft is not None
            assert expected is not None
            assert draft.tree.token_ids == expected.tree.token_ids
            for one in (session, other):
                one.post(SessionOutcome(length, draft.tree.token_ids[:1], b"", None))
    assert budget.num_forgotten >= 8


def idle_sessions(llama: LlamaForCausalLM, budget: CacheBudget, max_nodes: int) -> list[Session]:
    """Three sessions behind prompts of 20 tokens, each of which was asked for a draft."""
    drafter = test_small_lm.make_drafter(llama)
    prompts = np.random.default_rng(2).integers(0, VOCAB, (3, 20)).tolist()
    sessions = [
        Session(drafter, SessionOpening(tuple(prompt), SamplingParams(), max_nodes), AcceptanceMap(), budget)
        for prompt in prompts
    ]
    for session in sessions:
        session.advance()
    return sessions


def num_cached(sessions: Sequence[Session]) -> int:
    """What they really keep."""
    kept = 0
    for session in sessions:
        assert isinstance(session._sequence, CachingSequence)
        kept += session._sequence.num_cached
    return kept


def test_idle_work_keeps_to_the_limit_and_comes_to_an_end(llama: LlamaForCausalLM) -> None:
    budget = CacheBudget(34)
    sessions = idle_sessions(llama, budget, max_nodes=8)
    assert 0 < num_cached(sessions) <= 34
    working = sessions
    for _ in range(20):
        working = [session for session in working if session.prepare()]
    assert not working
    assert num_cached(sessions) == budget.num_tokens <= 34
    # One that was made to forget works ahead again when it was drafted for.
    first = sessions[0]
    first.post(SessionOutcome(20, (3,), b"", None))
    assert first.advance() is not None
    first.prepare()
    assert 20 < num_cached([first]) == num_cached(sessions) == budget.num_tokens


def test_without_a_tree_to_draft_there_is_no_idle_work(llama: LlamaForCausalLM) -> None:
    budget = CacheBudget(34)
    sessions = idle_sessions(llama, budget, max_nodes=0)
    assert not any(session.prepare() for session in sessions)
    assert num_cached(sessions) == budget.num_tokens == 0
    for session in sessions:
        session.post(SessionOutcome(20, (3,), b"", 8))
        assert session.advance() is not None
    assert 20 < num_cached(sessions) == budget.num_tokens <= 34
