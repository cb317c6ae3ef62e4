"""What trees promise comes to be what is accepted of them, whatever the drafter says of itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import ROOT, TokenTree, chain
from drafter_svc.acceptance_map import AcceptanceMap, ObservedCounts
from drafter_svc.session import Session, SessionOpening, SessionOutcome
from tests.unit.drafter_svc.test_session import CountingDrafter, CountingSequence

# (own probability of a node, its depth from 1) -> how likely the target is to say its token, if its parent is right.
Truth = Callable[[float, int], float]
WRONG_TOKEN = 99

TRUTHS: dict[str, Truth] = {
    "overconfident": lambda own, depth: own * 0.5,
    "overconfident below": lambda own, depth: own * 0.7**depth,
    "timid": lambda own, depth: own**0.5 * 0.9,
    "honest": lambda own, depth: own,
}


def drawn_tree(rng: random.Random) -> TokenTree:
    """A tree of up to three levels, with one to three children a node, that are likely together but not certain."""
    parents: list[int] = []
    values: list[float] = []
    tokens: list[int] = []
    level = [ROOT]
    for _ in range(3):
        below = []
        for parent in level:
            left = 0.95
            for token in range(rng.randint(1, 3)):
                probability = left * rng.uniform(0.2, 0.8)
                left -= probability
                below.append(len(tokens))
                parents.append(parent)
                values.append(probability)
                tokens.append(token)
        level = below
    return TokenTree(tuple(tokens), tuple(parents), logs(values), ("drawn",))


def logs(probabilities: list[float]) -> tuple[float, ...]:
    return tuple(math.log(value) for value in probabilities)


def target_tokens(tree: TokenTree, truth: Truth, rng: random.Random) -> list[int]:
    """What a target commits in a round: the tokens of a path, and one that leaves the tree."""
    said: list[int] = []
    node, depth = ROOT, 0
    while True:
        depth += 1
        draw = rng.random()
        for child in (at for at, parent in enumerate(tree.parents) if parent == node):
            draw -= min(1.0, truth(math.exp(tree.log_probs[child]), depth))
            if draw < 0:
                said.append(tree.token_ids[child])
                node = child
                break
        else:
            return [*said, WRONG_TOKEN]


def error(counts: ObservedCounts, temperature: int) -> float:
    """Mean difference of expected and observed acceptance, over tenths of probability."""
    pairs = zip(counts.expected[temperature], counts.accepted[temperature], strict=True)
    return sum(abs(expected - accepted) for expected, accepted in pairs) / sum(counts.nodes[temperature])


def learn(acceptance: AcceptanceMap, truth: Truth, rounds: int, temperature: float = 1.0, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        own = drawn_tree(rng)
        acceptance.calibrated(own, temperature).follow(target_tokens(own, truth, rng))


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_expected_acceptance_comes_within_three_hundredths_of_the_observed(truth: Truth) -> None:
    acceptance = AcceptanceMap()
    learn(acceptance, truth, rounds=1500)
    acceptance.counts = ObservedCounts()
    learn(acceptance, truth, rounds=1500, seed=1)
    assert error(acceptance.counts, 2) <= 0.03


def test_without_it_the_same_target_is_expected_to_accept_far_more() -> None:
    acceptance = AcceptanceMap(is_applied=False)
    learn(acceptance, TRUTHS["overconfident"], rounds=1500)
    assert error(acceptance.counts, 2) > 0.1
    tree = drawn_tree(random.Random(3))
    assert acceptance.calibrated(tree, 1.0).tree is tree


def test_it_begins_with_the_drafter_s_own_probabilities() -> None:
    tree = drawn_tree(random.Random(1))
    assert AcceptanceMap().calibrated(tree, 0.7).tree == tree


def test_only_nodes_whose_parent_was_committed_are_observed() -> None:
    # Two children of the root, each with two: what the target says behind the one that it did not take, nobody knows.
    tree = TokenTree((1, 2, 3, 4, 3, 4), (ROOT, ROOT, 0, 0, 1, 1), logs([0.5, 0.3, 0.6, 0.2, 0.6, 0.2]))
    acceptance = AcceptanceMap()
    acceptance.calibrated(tree, 0.0).follow([2, 4, 9])
    assert sum(acceptance.counts.nodes[0]) == 4
    assert sum(acceptance.counts.accepted[0]) == 2
    wrong = AcceptanceMap()
    wrong.calibrated(tree, 0.0).follow([7])
    assert (sum(wrong.counts.nodes[0]), sum(wrong.counts.accepted[0])) == (2, 0)


def test_seldom_reached_nodes_are_not_held_against_the_drafter() -> None:
    """Second tokens are right in 90 % of the cases in which first ones are, and these seldom."""
    acceptance = AcceptanceMap()
    rng = random.Random(0)
    tree = chain([1, 2], logs([0.9, 0.9]))
    for _ in range(4000):
        first, second = (1 if rng.random() < 0.1 else 7), (2 if rng.random() < 0.9 else 7)
        acceptance.calibrated(tree, 0.0).follow([first, second] if first == 1 else [first])
    first, second = map(math.exp, acceptance.calibrated(tree, 0.0).tree.log_probs)
    assert first == pytest.approx(0.1, abs=0.05)
    assert second == pytest.approx(0.9, abs=0.05)


def test_tokens_that_come_in_several_outcomes_are_one_path() -> None:
    at_once, in_parts = AcceptanceMap(), AcceptanceMap()
    rng = random.Random(5)
    for _ in range(50):
        tree = drawn_tree(rng)
        said = target_tokens(tree, TRUTHS["honest"], rng)
        at_once.calibrated(tree, 1.0).follow(said)
        sent = in_parts.calibrated(tree, 1.0)
        for token in said:
            sent.follow([token])
    assert at_once.counts.accepted == in_parts.counts.accepted
    assert at_once.counts.nodes == in_parts.counts.nodes


def test_what_was_learned_at_one_temperature_says_nothing_of_another() -> None:
    acceptance = AcceptanceMap()
    learn(acceptance, TRUTHS["overconfident"], rounds=300, temperature=1.0)
    tree = drawn_tree(random.Random(2))
    assert acceptance.calibrated(tree, 0.0).tree == tree
    assert acceptance.calibrated(tree, 0.5).tree == tree
    assert acceptance.calibrated(tree, 1.0).tree != tree


def test_old_outcomes_are_outweighed_when_the_target_changes() -> None:
    acceptance = AcceptanceMap()
    learn(acceptance, TRUTHS["timid"], rounds=4000)
    learn(acceptance, TRUTHS["overconfident"], rounds=4000, seed=1)
    acceptance.counts = ObservedCounts()
    learn(acceptance, TRUTHS["overconfident"], rounds=1500, seed=2)
    assert error(acceptance.counts, 2) <= 0.03


def test_the_same_history_gives_the_same_map() -> None:
    first, second = AcceptanceMap(), AcceptanceMap()
    for acceptance in (first, second):
        learn(acceptance, TRUTHS["timid"], rounds=200)
    tree = drawn_tree(random.Random(4))
    assert first.calibrated(tree, 1.0).tree.log_probs == second.calibrated(tree, 1.0).tree.log_probs


def test_nothing_becomes_certain_and_trees_stay_valid() -> None:
    acceptance = AcceptanceMap()
    tree = chain([1] * 20, logs([0.9] * 20))
    for _ in range(500):
        acceptance.calibrated(tree, 0.0).follow([1] * 20)
    learned = acceptance.calibrated(tree, 0.0).tree
    assert all(math.log(0.9) < value <= math.log(0.999) + 1e-9 for value in learned.log_probs)
    certain = chain([1], [0.0])
    assert acceptance.calibrated(certain, 0.0).tree.log_probs == (0.0,)


def size_of(thing: object) -> int:
    """Entries of the lists that hang on an object, at any depth."""
    if isinstance(thing, list):
        return len(thing) + sum(map(size_of, thing))
    return sum(map(size_of, vars(thing).values())) if hasattr(thing, "__dict__") else 0


def test_its_memory_does_not_grow() -> None:
    acceptance = AcceptanceMap()
    before = size_of(acceptance)
    learn(acceptance, TRUTHS["honest"], rounds=500)
    assert size_of(acceptance) == before > 0


class DoubtfulSequence(CountingSequence):
    """Always drafts one node, of which it is half sure."""

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        super().draft(max_nodes, row_multiple)
        return chain([5], logs([0.5]))


class DoubtfulDrafter(CountingDrafter):
    def open(
        self, prompt: object, sampling: SamplingParams, cache_salt: str = "", *, drafts_ahead: bool = True
    ) -> DoubtfulSequence:
        return DoubtfulSequence((1,))


def test_sequences_of_a_service_learn_from_each_other_and_the_search_knows_nothing_of_it() -> None:
    acceptance = AcceptanceMap()
    for _ in range(40):
        session = Session(DoubtfulDrafter(), SessionOpening((1, 2, 3), SamplingParams(), 4), acceptance)
        assert session.advance() is not None
        session.post(SessionOutcome(3, (5,), b"", None))
        session.advance()
    fresh = Session(DoubtfulDrafter(), SessionOpening((1, 2, 3), SamplingParams(), 4), acceptance).advance()
    assert fresh is not None
    assert math.exp(fresh.tree.log_probs[0]) > 0.7
    assert (fresh.tree.token_ids, fresh.tree.parents) == ((5,), (ROOT,))
    assert sum(acceptance.counts.accepted[0]) == 40
