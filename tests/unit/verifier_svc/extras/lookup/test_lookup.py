"""Prompt lookup: drafts of what came before, worth what was counted, and none where rows cost more."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import ROOT, TokenTree
from tests.unit.verifier_svc.engine_harness import Harness, Result
from tests.unit.verifier_svc.tiny_engine import LIMITS, PROMPTS, SAMPLING, tiny_info, tiny_target
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.pass_cost import PassCost
from verifier_svc.extras.lookup.lookup import SOURCE, LookupSettings, PromptLookup


def chain_of(tree: TokenTree) -> list[int]:
    """Tokens from the root's likeliest child down."""
    at, tokens = ROOT, []
    while children := [(tree.log_probs[node], node) for node, parent in enumerate(tree.parents) if parent == at]:
        at = max(children)[1]
        tokens.append(tree.token_ids[at])
    return tokens


class FreeRows(PassCost):
    """Passes take as long with rows as without."""

    @property
    def own_rows(self) -> float:
        return math.inf


def test_what_followed_the_longest_match_comes_first() -> None:
    lookup = PromptLookup(LookupSettings(16, FreeRows()), 16, sampled=False)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 9, 9, 2, 3]
    tree = lookup.draft(tokens, 1)
    assert chain_of(tree)[:3] == [4, 5, 6]
    assert tree.source_names == (SOURCE,)
    assert len(PromptLookup(LookupSettings(3, FreeRows()), 16, sampled=False).draft(tokens, 1)) == 3
    assert len(PromptLookup(LookupSettings(16, FreeRows()), 2, sampled=False).draft(tokens, 1)) == 2


def test_a_token_that_was_never_seen_gives_no_draft() -> None:
    lookup = PromptLookup(LookupSettings(16), 16, sampled=False)
    assert len(lookup.draft([1, 2, 3], 1)) == 0
    assert len(lookup.draft([1, 2, 3, 1, 2], 1)) > 0


def test_drafts_grow_where_they_are_right_and_end_where_they_are_wrong() -> None:
    settings = LookupSettings(16)
    rng = random.Random(1)
    # The last tokens come again, and never go on as they did.
    lookup, tokens = PromptLookup(settings, 16, sampled=False), [rng.randrange(8) for _ in range(50)]
    sizes = []
    for _ in range(400):
        sizes.append(len(lookup.draft(tokens, 1)))
        new = [rng.randrange(8)]
        lookup.committed(new)
        tokens += new
    assert sum(sizes[-50:]) / 50 < sum(sizes[:10]) / 10
    settings = LookupSettings(16)
    lookup, tokens = PromptLookup(settings, 16, sampled=False), [1, 2, 3, 4, 5, 6, 7, 8] * 3
    for _ in range(20):
        tree = lookup.draft(tokens, 1)
        new = [(tokens[-1] + at) % 8 + 1 for at in range(5)]
        lookup.committed(new)
        tokens += new
    assert len(tree) == 16
    assert chain_of(tree)[:4] == [(tokens[-6] + at) % 8 + 1 for at in range(4)]
    assert tree.expected_tokens > 8


@pytest.mark.parametrize("sampled", [False, True])
def test_promises_are_what_comes_true(sampled: bool) -> None:
    """A text in which each token is followed by the same one three times out of four."""
    rng = random.Random(2)
    lookup, tokens = PromptLookup(LookupSettings(8), 8, sampled=sampled), [0]
    promised = right = 0.0
    for step in range(3000):
        tree = lookup.draft(tokens, 1)
        new = [(tokens[-1] * 7 + 1) % 31 if rng.random() < 0.75 else rng.randrange(31)]
        lookup.committed(new)
        tokens += new
        if step > 500:
            firsts = [node for node, parent in enumerate(tree.parents) if parent == ROOT]
            promised += sum(math.exp(tree.log_probs[node]) for node in firsts)
            right += any(tree.token_ids[node] == new[0] for node in firsts)
    assert promised == pytest.approx(right, rel=0.15)
    assert right > 1500


def test_many_sequences_or_dear_rows_leave_no_room_for_unlikely_guesses() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 2, 3, 9, 1, 2, 3]
    few = [len(PromptLookup(LookupSettings(16), 16, sampled=False).draft(tokens, number)) for number in (1, 4, 5)]
    assert few[0] >= few[1] > few[2] == 0
    dear = PassCost()
    cheap = PassCost()
    for step in range(200):
        rows = 1 + step % 16
        dear.add(rows, 1e-3 * rows)
        cheap.add(rows, 1e-2 + 1e-5 * rows)
    assert len(PromptLookup(LookupSettings(16, dear), 16, sampled=False).draft(tokens, 1)) == 0
    assert len(PromptLookup(LookupSettings(16, cheap), 16, sampled=False).draft(tokens, 1)) >= few[0]


def run(model: PreTrainedModel, lookup_nodes: int, sampling: SamplingParams) -> list[Result]:
    info = replace(tiny_info(), lookup=LookupSettings(16, FreeRows()))
    engine = Engine(tiny_target(model), info, LIMITS, 16)
    engine.start()
    try:
        stopping = StoppingOptions(max_tokens=60, ignore_eos=True)
        return Harness(engine).generate(PROMPTS, sampling, stopping, lookup_nodes=lookup_nodes)
    finally:
        engine.stop()


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_tokens_are_those_of_plain_decoding(
    new_model: Callable[[str], PreTrainedModel], sampling: SamplingParams
) -> None:
    plain, drafted = run(new_model("llama"), 0, sampling), run(new_model("llama"), 16, sampling)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.accepted for one in plain) == 0
    if sampling.temperature == 0:
        # A random model repeats itself.
        assert sum(one.accepted for one in drafted) > 5
        assert sum(one.rounds for one in drafted) < sum(one.rounds for one in plain)
