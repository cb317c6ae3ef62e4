"""Rounds of traversal verification: which drafts they take, what they refuse, and what they leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.core.chance import Chance, Purpose, UniformChance, uniforms
from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.errors import UnsupportedError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from drafter_svc.drafters.small_lm.sampled_lm import sample_tree
from tests.unit.verifier_svc.enumeration import every_outcome
from tests.unit.verifier_svc.traversal_door import ENDLESS, PROMPT, VOCAB, Door, draw, raw_logits, some_tree
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.engine.sequence import SequenceKey
from verifier_svc.stream.events import DraftRejection, ErrorEvent, OutcomeEvent
from verifier_svc.verify.sampler import Logits
from verifier_svc.verify.token_choice import TokenChooser


def coupled_token(params: SamplingParams) -> int:
    """What a plain round says first."""
    return TokenChooser(params, VOCAB, prompt=PROMPT).choose(raw_logits(PROMPT), len(PROMPT))


@pytest.mark.parametrize("seed", range(6))
def test_a_round_without_its_tree_is_a_plain_one(seed: int, door: Door) -> None:
    """Nothing came, it came for another length, it is larger than the budget: all of it or nothing."""
    params = SamplingParams(temperature=1.0, seed=seed)
    tree = some_tree(params)
    ways: list[tuple[int, TokenTree, int]] = [
        (len(PROMPT), EMPTY_TREE, 0),
        (len(PROMPT) - 1, tree, 0),
        (len(PROMPT) + 1, tree, 0),
        (len(PROMPT), tree, len(tree) - 1),
        (len(PROMPT), some_tree(params, widths=(3, 2)), 0),
    ]
    for base_length, sent, budget in ways:
        key = door.open(params, ENDLESS)
        door.draft(key, base_length, sent, budget)
        outcome = door.round(key)
        door.close(key)
        assert (outcome.token_ids, outcome.draft_nodes) == ((coupled_token(params),), 0)
        assert outcome.stale_drafts == (base_length != len(PROMPT))


def test_a_tree_that_finds_no_room_in_the_cache_is_dropped_whole(door: Door) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    sequence_key = door.open(params, ENDLESS)
    tree = some_tree(params)
    door.draft(sequence_key, len(PROMPT), tree)
    door.engine._take_commands()
    door.engine.scheduler.admit(0.0)
    sequence = door.engine.scheduler.find(sequence_key)
    assert sequence is not None
    assert len(sequence.next_rows(len(PROMPT), len(tree) - 1).tree) == 0
    assert sequence.next_rows(len(PROMPT), len(tree)).tree.distributions == tree.distributions
    door.close(sequence_key)


def test_nothing_of_a_tree_outlives_its_round(door: Door) -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    key = door.open(params, StoppingOptions(max_tokens=8, ignore_eos=True))
    door.draft(key, len(PROMPT), some_tree(params))
    first = door.round(key)
    door.draft(key, len(PROMPT), some_tree(params))
    second = door.round(key)
    assert first.draft_nodes == 4
    assert (second.base_length, second.draft_nodes) == (len(PROMPT) + len(first.token_ids), 0)
    assert second.stale_drafts == 1
    door.close(key)


def test_one_seed_and_the_same_drafts_give_the_same_rounds(door: Door) -> None:
    blocks = set()
    for seed in range(40):
        params = SamplingParams(temperature=1.0, seed=seed)
        tree = draw(params, (2, 1), VOCAB, UniformChance(iter([0.2, 0.7, 0.4, 0.6])))
        outcomes = []
        for _ in range(2):
            key = door.open(params, ENDLESS)
            door.draft(key, len(PROMPT), tree)
            outcomes.append(door.round(key).token_ids)
            door.close(key)
        assert outcomes[0] == outcomes[1]
        blocks.add(outcomes[0])
    assert len(blocks) > 2


def test_log_probabilities_are_those_of_the_committed_tokens(door: Door, told: list[Chance]) -> None:
    params = SamplingParams(temperature=0.75, seed=7)
    tree = some_tree(params)

    def run(chance: Chance) -> RoundOutcome:
        told.append(chance)
        key = door.open(params, ENDLESS, top_log_probs=1)
        door.draft(key, len(PROMPT), tree)
        outcome = door.round(key)
        door.close(key)
        return outcome

    lengths = set()
    for outcome, _ in every_outcome(run):
        lengths.add(len(outcome.token_ids))
        for place, (token, found) in enumerate(zip(outcome.token_ids, outcome.log_probs, strict=True)):
            row = raw_logits((*PROMPT, *outcome.token_ids[:place])).astype(np.float64)
            expected = row - np.log(np.exp(row).sum())
            assert found.log_prob == pytest.approx(expected[token], abs=1e-9)
            assert found.top_token_ids == (int(row.argmax()),)
    assert lengths == {1, 2, 3}


def test_a_tree_without_distributions_is_refused_and_the_sequence_goes_on(door: Door) -> None:
    params = SamplingParams(temperature=1.0, seed=2)
    key = door.open(params, ENDLESS)
    door.draft(key, len(PROMPT), chain([1, 0]))
    said = door.step()
    [rejection] = [event for event in said if isinstance(event, DraftRejection)]
    [outcome] = [event.outcome for event in said if isinstance(event, OutcomeEvent)]
    assert "needs the distributions" in str(rejection.error)
    assert (outcome.token_ids, outcome.draft_nodes) == ((coupled_token(params),), 0)
    door.close(key)


def test_a_distribution_outside_the_vocabulary_is_refused_at_the_door(door: Door) -> None:
    key = door.open(SamplingParams(temperature=1.0), ENDLESS)
    door.step()
    outside = DraftDistribution((0, VOCAB), (1.0, 1.0))
    door.draft(key, 3, TokenTree((0,), (-1,), (0.0,), distributions=(outside, None)))
    [rejection] = [event for event in door.step() if isinstance(event, DraftRejection)]
    assert rejection.error.field == "draft.tree.distribution_token_ids"
    door.close(key)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_refused_above_temperature_0(temperature: float, door: Door) -> None:
    params = SamplingParams(temperature=temperature, grammar=Grammar(GrammarKind.REGEX, "[ab]*"))
    if temperature:
        door.open(params, ENDLESS)
        [refusal] = door.step()
        assert isinstance(refusal, ErrorEvent)
        assert isinstance(refusal.error, UnsupportedError)
        assert "sampling.grammar: is not offered together with acceptance TRAVERSAL" in str(refusal.error)
    else:
        door.close(door.open(params, ENDLESS))


def test_at_temperature_0_drafts_are_followed_and_tokens_are_the_targets_own(door: Door) -> None:
    params = SamplingParams()
    expected: list[int] = []
    while len(expected) < 6:
        expected.append(int(raw_logits((*PROMPT, *expected)).argmax()))
    stopping = StoppingOptions(max_tokens=6, ignore_eos=True)
    key = door.open(params, stopping)
    drafted = TokenTree((expected[0], expected[1], 1 - expected[0] % 2), (-1, 0, 1), (0.0,) * 3)
    door.draft(key, len(PROMPT), drafted)
    first = door.round(key)
    said = list(first.token_ids)
    while len(said) < 6:
        said += door.round(key).token_ids
    assert said == expected
    assert len(first.accepted_nodes) >= 2


def test_sequences_that_make_room_for_each_other_go_on_where_they_were() -> None:
    """Every token's log-probability is that behind the tokens before it: no pass saw a row that was not accepted."""

    def forgetful(context: tuple[int, ...]) -> Logits:
        return raw_logits((len(context), *context[-3:]))

    def tree_behind(context: tuple[int, ...], seed: int) -> TokenTree:
        chance = UniformChance(uniforms(seed, len(context), Purpose.DRAFT))
        return sample_tree(
            (2, 1, 1), lambda paths: [truncated(forgetful((*context, *path)), 2.0, 3, 2) for path in paths], chance
        ).token_tree("toy")

    door = Door(forgetful, context=220, num_blocks=8)
    stopping = StoppingOptions(max_tokens=200, ignore_eos=True)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    keys = [door.open(one, stopping, top_log_probs=0) for one in params]
    said: dict[int, list[int]] = {key.sequence_id: [] for key in keys}
    unfinished, accepted = set(said), 0
    while unfinished:
        for event in door.step():
            if not isinstance(event, OutcomeEvent):
                continue
            number, outcome = event.sequence_id, event.outcome
            for token, found in zip(outcome.token_ids, outcome.log_probs, strict=True):
                row = forgetful((*PROMPT, *said[number])).astype(np.float64)
                assert found.log_prob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-9)
                said[number].append(token)
            accepted += len(outcome.accepted_nodes)
            if outcome.finish is not None:
                unfinished.discard(number)
                continue
            context = (*PROMPT, *said[number])
            door.draft(SequenceKey(0, number), len(context), tree_behind(context, number))
    assert [len(output) for output in said.values()] == [200] * 4
    assert door.engine.scheduler.num_preemptions > 0
    assert accepted > 200
