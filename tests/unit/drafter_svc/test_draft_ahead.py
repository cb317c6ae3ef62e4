"""Drafting ahead: what is computed while nobody waits is there when the outcome comes, and changes no complete tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from coppice.sampling import SamplingParams
from coppice.tree import TokenTree
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.checkpoint import Calibration
from drafter_svc.drafters.llama_forward import LlamaForward
from drafter_svc.drafters.small_lm import DraftAhead, SmallLm
from drafter_svc.drafters.tree_cache import FloatArray, Rows
from drafter_svc.session import Opening, Outcome, Session
from drafter_svc.tree_builder import TreeLimits

VOCAB = 61
PROMPT = (5, 9, 2, 44, 17)
# Enough passes for every search to be complete: a tree then depends on the committed tokens alone.
COMPLETE = TreeLimits(max_nodes=10, max_steps=99)


class CountingForward(LlamaForward):
    """Counts passes."""

    passes = 0

    def run(self, store: Any, rows: Rows) -> FloatArray:
        self.passes += 1
        return super().run(store, rows)


def make_drafter(model: LlamaForCausalLM, ahead_steps: int) -> tuple[SmallLm, CountingForward]:
    forward = CountingForward(model)
    info = DrafterInfo("small-lm", "test", "", VOCAB, 64)
    return SmallLm(forward, info, Calibration(((0.0, 0.8),)), COMPLETE, DraftAhead(max_steps=ahead_steps)), forward


def prepare_fully(sequence: Any) -> int:
    steps = 1
    while sequence.prepare():
        steps += 1
    return steps


def likely_outcome(tree: TokenTree, bonus: Sequence[int]) -> list[int]:
    best = max(range(len(tree)), key=lambda node: tree.path_log_probs[node])
    return [*(tree.token_ids[node] for node in tree.path(best)), *bonus]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature {}".format)
def test_trees_are_those_of_a_fresh_sequence_whatever_was_drafted_ahead(
    llama: LlamaForCausalLM, temperature: float
) -> None:
    drafter, _ = make_drafter(llama, ahead_steps=6)
    fresh, _ = make_drafter(llama, ahead_steps=0)
    sampling = SamplingParams(temperature=temperature, seed=4)
    rng = np.random.default_rng(5)
    committed, sequence = list(PROMPT), drafter.open(PROMPT, sampling)
    for turn in range(8):
        tree = sequence.draft(10)
        expected = fresh.open(committed, sampling).draft(10)
        assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
        assert tree.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        for _ in range(turn):
            sequence.prepare()
        # Sometimes what the drafter expects, sometimes a token that it has never seen.
        bonus = [] if turn % 3 == 0 else [int(rng.integers(VOCAB))]
        outcome = likely_outcome(tree, bonus)
        sequence.extend(outcome)
        committed += outcome


def test_an_outcome_that_was_foreseen_needs_fewer_passes(llama: LlamaForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=4)
    passes = {}
    for ahead_steps in (0, 8):
        drafter, forward = make_drafter(llama, ahead_steps)
        sequence = drafter.open(PROMPT, sampling)
        tree = sequence.draft(10)
        prepare_fully(sequence)
        before = forward.passes
        sequence.extend(likely_outcome(tree, []))
        sequence.draft(10)
        passes[ahead_steps] = forward.passes - before
    assert passes[8] < passes[0]


def test_drafting_ahead_is_bounded_and_happens_in_single_passes(llama: LlamaForCausalLM) -> None:
    drafter, forward = make_drafter(llama, ahead_steps=5)
    sequence = drafter.open(PROMPT, SamplingParams())
    sequence.draft(10)
    before = forward.passes
    for _ in range(5):
        at = forward.passes
        sequence.prepare()
        assert forward.passes - at <= 1
    assert prepare_fully(sequence) == 1
    assert forward.passes - before <= 5
    sequence.draft(10)
    assert sequence.prepare() or forward.passes - before >= 5


def test_the_grown_tree_is_reported_and_holds_the_draft_and_more(llama: LlamaForCausalLM) -> None:
    drafter, _ = make_drafter(llama, ahead_steps=6)
    sequence = drafter.open(PROMPT, SamplingParams(temperature=1.0, seed=4))
    tree = sequence.draft(10)
    assert sequence.ahead() is None
    reports = []
    more = True
    while more:
        more = sequence.prepare()
        if (grown := sequence.ahead()) is not None:
            reports.append(grown)
    assert 1 <= len(reports) <= 2
    assert set(tree.paths()) < set(reports[-1].paths())
    assert sequence.ahead() is None


def test_a_synchronous_sequence_runs_no_pass_between_its_tree_and_the_outcome(llama: LlamaForCausalLM) -> None:
    drafter, forward = make_drafter(llama, ahead_steps=8)
    opening = Opening(PROMPT, SamplingParams(temperature=1.0, seed=4), 10, is_synchronous=True)
    session = Session(drafter, opening, AcceptanceMap())
    for base in (len(PROMPT), len(PROMPT) + 1):
        draft = session.advance()
        assert draft is not None
        assert draft.base_length == base
        before = forward.passes
        assert not session.prepare()
        assert session.ahead() is None
        assert forward.passes == before
        session.post(Outcome(base, draft.tree.token_ids[:1], b"", None))
